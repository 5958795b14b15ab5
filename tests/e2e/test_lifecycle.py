"""Leaving, waiting, dying: what holds when clients and processes misbehave. Needs the stack in this loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from epicycle.transport.config import ServerConfig
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Drain
from epicycle.transport.wire.request import Admitting, Rejected
from tests.e2e.client import CHAT, COMPLETIONS, HELLO, Client
from tests.fakes.stack import MOCK, UNLIMITED, Stack, until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True}


def stack_with(**server: Any) -> Stack:
    return Stack(msgspec.structs.replace(MOCK, server=ServerConfig(**server)))


@pytest.fixture
async def impatient() -> AsyncIterator[Stack]:
    """Headers go out at once, keep-alive comments follow quickly."""
    async with stack_with(header_wait_s=0.01, keepalive_s=0.01) as stack:
        yield stack


async def is_idle(stack: Stack) -> None:
    """Table, slots and pages are back to nothing."""
    await until(lambda: stack.resident == 0 and len(stack.gateway.core.table) == 0)
    await until(
        lambda: all(unit.leases.free_pages == unit.leases.total_pages for unit in stack.control.scheduler.units)
    )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("ticks", [0, 2, 8])
async def test_disconnect_cancels_at_every_stage(stack: Stack, is_stream: bool, ticks: int) -> None:
    """Before the executor runs (0), within the prompt (2), between tokens (8); nothing is written meanwhile."""
    stack.allow(ticks)
    async with Client(stack.base_url) as client:
        _, writer = await client.dial(COMPLETIONS, LONG | {"stream": is_stream})
        await stack.until_resident(1)
        await until(lambda: stack.ticks_left == 0)
        writer.close()
        await until(lambda: len(stack.gateway.core.table) == 0)
        stack.allow(UNLIMITED)
        await is_idle(stack)
        assert 1 == await client.metric('epicycle_aborts_total{cause="client",gateway="gw0"}')
        assert 200 == (await client.complete(max_tokens=1)).status


async def test_disconnect_ends_every_choice(stack: Stack) -> None:
    stack.allow(0)
    async with Client(stack.base_url) as client:
        _, writer = await client.dial(COMPLETIONS, LONG | {"n": 5})
        await stack.until_resident(5)
        writer.close()
        await until(lambda: len(stack.gateway.core.table) == 0)
        stack.allow(UNLIMITED)
        await is_idle(stack)


async def test_half_closed_connection_is_a_disconnect(stack: Stack) -> None:
    stack.allow(0)
    async with Client(stack.base_url) as client:
        _, writer = await client.dial(COMPLETIONS, LONG)
        await stack.until_resident(1)
        writer.write_eof()
        await until(lambda: len(stack.gateway.core.table) == 0)
        stack.allow(UNLIMITED)
        await is_idle(stack)
        writer.close()


async def test_headers_wait_for_the_first_token(stack: Stack) -> None:
    stack.allow(0)
    async with Client(stack.base_url) as client:
        answer = asyncio.create_task(client.post(COMPLETIONS, **LONG, stream=True))
        await stack.until_resident(1)
        await stack.kill_executor()
        lost = await answer
        assert (503, "engine_lost") == (lost.status, lost.error["code"])
        assert "1" == lost.headers["Retry-After"]


async def test_failure_behind_headers_is_an_error_event_without_done(impatient: Stack) -> None:
    impatient.allow(0)
    async with Client(impatient.base_url) as client:
        reader, writer = await client.dial(CHAT, {"messages": HELLO, "stream": True})
        head = await reader.readuntil(b": ping\n\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readuntil(b": ping\n\n")
        await impatient.kill_executor()
        rest = await reader.readuntil(b"0\r\n\r\n")
        data = next(line for line in rest.splitlines() if line.startswith(b"data: "))
        assert "engine_lost" == json.loads(data[6:])["error"]["code"]
        assert b"[DONE]" not in rest
        writer.close()


async def test_tokens_follow_the_comments_of_a_long_prompt(impatient: Stack) -> None:
    impatient.allow(0)
    async with Client(impatient.base_url) as client:
        reader, writer = await client.dial(COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "stream": True})
        for _ in range(3):
            await reader.readuntil(b": ping\n\n")
        impatient.allow(UNLIMITED)
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert 3 == rest.count(b"data: {")
        writer.close()


async def test_slow_client_is_cut_off_and_others_are_not() -> None:
    async with stack_with(slow_client_events=16) as stack, Client(stack.base_url) as client:
        _, writer = await client.dial(
            COMPLETIONS, {"prompt": "x" * 50, "n": 32, **LONG, "stream": True, "logprobs": 20}
        )
        await until(lambda: stack.gateway.core.metrics.aborts["slow_client"] == 1)
        assert 200 == (await client.complete(max_tokens=5)).status
        await is_idle(stack)
        writer.close()


async def test_full_submit_link_is_429(stack: Stack) -> None:
    stack.gateway.core.links._connected_s = -10.0
    submit = next(end.address for end in stack.control_host.endpoints if end.link == "submit")
    stack.fabric.blocked.add(submit)
    async with Client(stack.base_url) as client:
        answer = await client.complete()
        assert (429, "overloaded") == (answer.status, answer.error["code"])
        assert "Retry-After" in answer.headers
        stack.fabric.blocked.clear()
        assert 200 == (await client.complete(max_tokens=1)).status


async def test_lost_control_ends_requests_and_readiness(stack: Stack) -> None:
    stack.allow(0)
    async with Client(stack.base_url) as client:
        answer = asyncio.create_task(client.complete(**LONG))
        await stack.until_resident(1)
        stack.lose_control()
        assert (503, "engine_lost") == ((lost := await answer).status, lost.error["code"])
        assert 503 == (await client.get("/readyz")).status
        assert 200 == (await client.get("/livez")).status
        assert "not_ready" == (await client.complete()).error["code"]
        stack.gateway_host.peer_up(stack.control_host.as_peer())
        assert 200 == (await client.get("/readyz")).status
        stack.allow(UNLIMITED)


async def test_new_executor_serves_again(stack: Stack) -> None:
    async with Client(stack.base_url) as client:
        await stack.kill_executor()
        assert "not_ready" == (await client.complete()).error["code"]
        assert "max_model_len" not in (await client.get("/v1/models")).json["data"][0]
        stack.start_executor(2)
        assert 200 == (await client.complete(max_tokens=2)).status


async def test_readiness_waits_until_control_knows_the_executor(stack: Stack) -> None:
    async with Client(stack.base_url) as client:
        await stack.kill_executor()
        stack.start_executor(2, is_control_told=False)
        assert (503, "not_ready") == ((unready := await client.get("/readyz")).status, unready.json["status"])
        assert "control" in unready.json["reason"]
        assert (503, "not_ready") == ((refused := await client.complete()).status, refused.error["code"])
        assert 0 == stack.control.admission.rejections["not_ready"]
        stack.tell_control()
        await until(lambda: stack.gateway.core.is_known_to_control)
        assert 200 == (await client.get("/readyz")).status
        assert 200 == (await client.complete(max_tokens=2)).status


async def test_the_word_of_an_old_control_makes_no_gateway_ready(stack: Stack) -> None:
    verdicts = next(end.address for end in stack.gateway_host.endpoints if end.link == "verdicts")
    sender, executors = stack.fabric.connect(verdicts), pack(I32, [stack.executor_host.epoch])
    restarted = msgspec.structs.replace(stack.control_host.as_peer(), epoch=2)
    async with Client(stack.base_url) as client:
        stack.lose_control()
        stack.gateway_host.peer_up(restarted)
        assert 503 == (await client.get("/readyz")).status
        sender.send(Admitting(2, executors))
        await until(lambda: stack.gateway.core.is_known_to_control)
        sender.send(Admitting(1))
        sender.send(Rejected(1, "overloaded", "of nobody"))  # counted, so it shows that both have arrived
        await until(lambda: stack.gateway.core.table.counts.late_terminals == 1)
        assert 200 == (await client.get("/readyz")).status
    sender.close()


async def test_drain_refuses_new_requests_and_finishes_old_ones(stack: Stack) -> None:
    stack.allow(6)
    async with Client(stack.base_url) as client:
        running = asyncio.create_task(client.complete(max_tokens=40))
        await stack.until_resident(1)
        stack.gateway_host.drain(Drain(60_000))
        refused = await client.complete()
        assert (503, "draining") == (refused.status, refused.error["code"])
        assert "5" == refused.headers["Retry-After"]
        assert not stack.gateway_host.is_drained
        stack.allow(UNLIMITED)
        assert 200 == (await running).status
        await until(lambda: stack.gateway_host.is_drained)


async def test_silent_supervisor_makes_health_503_and_leaves_metrics(stack: Stack) -> None:
    stack.is_supervisor_silent = True
    async with Client(stack.base_url) as client:
        assert 503 == (await client.get("/health")).status
        assert 200 == (await client.get("/metrics")).status
        assert 200 == (await client.get("/livez")).status


async def test_keys_and_origins() -> None:
    async with (
        stack_with(api_key="sesame", allowed_origins=["https://here"]) as stack,
        Client(stack.base_url) as client,
    ):
        assert (401, "invalid_api_key") == ((a := await client.get("/v1/models")).status, a.error["code"])
        good = {"Authorization": "Bearer sesame"}
        assert 200 == (await client.get("/v1/models", **good)).status
        assert 401 == (await client.get("/v1/models", Authorization="Bearer sesam\u00e9")).status
        assert 200 == (await client.get("/livez")).status
        assert 403 == (await client.get("/v1/models", Origin="https://there", **good)).status
        preflight = await client.send("OPTIONS", CHAT, headers={"Origin": "https://here"})
        assert (204, "https://here") == (preflight.status, preflight.headers["Access-Control-Allow-Origin"])
        answer = await client.get("/v1/models", Origin="https://here", **good)
        assert "https://here" == answer.headers["Access-Control-Allow-Origin"]


async def test_body_that_never_arrives_is_408() -> None:
    async with stack_with(body_timeout_s=0.01) as stack, Client(stack.base_url) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n" % COMPLETIONS.encode())
        writer.write(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        assert 200 == (await client.complete(max_tokens=1)).status
