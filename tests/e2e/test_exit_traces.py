"""Recorded exit depths by id and inline, on every way in: completions, chat, and the client over ZeroMQ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epicycle.transport.dealer import Dealer
from epicycle.transport.wire.client import Done, Event, Failed, Generate, ToClient
from epicycle.transport.wire.columns import U16, unpack_list
from tests.e2e.client import HELLO, Client
from tests.fakes.stack import MOCK, Stack, until

WALK = [4, 1, 2, 3, 4, 1]
Told = dict[str, Any]  # depths of a good end, or status, code, param, message of a bad one
Way = Callable[[Stack, dict[str, Any]], Awaitable[Told]]


@pytest.fixture
async def tracing(short_dir: Path) -> AsyncIterator[Stack]:
    traces = short_dir / "traces.json"
    traces.write_text(json.dumps({"walk": WALK, "deep": [4, 4, 9]}))
    server = msgspec.structs.replace(MOCK.server, trace_file=str(traces))
    engine = msgspec.structs.replace(MOCK.engine, exit_rule="trace")
    async with Stack(msgspec.structs.replace(MOCK, server=server, engine=engine, run_dir=str(short_dir))) as stack:
        yield stack


async def over_completions(stack: Stack, fields: dict[str, Any]) -> Told:
    async with Client(stack.base_url) as client:
        answer = await client.complete(ignore_eos=True, **fields)
    return {"depths": answer.choice["exit_depths"]} if answer.status == 200 else {"status": 400, **answer.error}


async def over_chat(stack: Stack, fields: dict[str, Any]) -> Told:
    async with Client(stack.base_url) as client:
        answer = await client.chat(ignore_eos=True, stream=True, **fields)
    if answer.status != 200:
        return {"status": answer.status, **answer.error}
    return {"depths": [depth for event in answer.events for depth in event["choices"][0]["exit_depths"]]}


async def over_zmq(stack: Stack, fields: dict[str, Any]) -> Told:
    address = next(end.address for end in stack.gateway_host.endpoints if end.link == "client")
    heard: list[ToClient] = []
    dealer = Dealer(address, ToClient, on_message=heard.append, on_lost=lambda: None)
    assert await dealer.wait_connected(5)
    dealer.send(Generate(1, "chat", msgspec.json.encode({"messages": HELLO, "ignore_eos": True, **fields})))
    await until(lambda: any(isinstance(message, Done | Failed) for message in heard))
    dealer.close()
    await asyncio.sleep(0)
    if isinstance(failed := heard[-1], Failed):
        return {"status": failed.status, "code": failed.code, "param": failed.param, "message": failed.message}
    events = [message for message in heard if isinstance(message, Event)]
    return {"depths": [depth for event in events for depth in unpack_list(U16, event.exit_depths)]}


WAYS = [over_completions, over_chat, over_zmq]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fields", [{"trace_id": "walk", "max_tokens": 6}, {"exit_trace": WALK, "max_tokens": 6}])
async def test_listed_depths_are_followed(tracing: Stack, way: Way, fields: dict[str, Any]) -> None:
    assert {"depths": WALK} == await way(tracing, fields)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"trace_id": "nobody", "max_tokens": 2}, "trace_id", "'nobody' is not in the server's trace file"),
        ({"trace_id": "walk", "max_tokens": 7}, "trace_id", "lists 6 depths, max_tokens is 7"),
        ({"trace_id": "deep", "max_tokens": 3}, "trace_id", "trace_id[2] is 9"),
        ({"trace_id": "walk", "max_tokens": 6, "min_loops": 2}, "trace_id", "trace_id[1] is 1, must be between"),
        ({"exit_trace": [4, 3], "max_tokens": 2, "max_loops": 2}, "exit_trace", "exit_trace[1] is 3"),
        ({"exit_trace": [4, 3], "max_tokens": 3}, "exit_trace", "lists 2 depths, max_tokens is 3"),
        ({"exit_trace": [2, 2], "max_tokens": 2}, "exit_trace", "exit_trace[0] is 2, must be 4"),
        ({"exit_trace": [], "max_tokens": 1}, "exit_trace", "exit_trace is empty"),
        ({"exit_trace": []}, "exit_trace", "exit_trace is empty"),
    ],
)
async def test_what_cannot_be_followed_is_refused_with_field_and_value(
    tracing: Stack, way: Way, fields: dict[str, Any], param: str, part: str
) -> None:
    told = await way(tracing, fields)

    assert (400, "invalid_request_error", param) == (told["status"], told["code"], told["param"])
    assert part in told["message"]


@pytest.mark.parametrize("fields", [{"trace_id": "walk"}, {"exit_trace": [4]}])
async def test_other_rules_refuse_traces(stack: Stack, fields: dict[str, Any]) -> None:
    told = await over_completions(stack, fields | {"max_tokens": 1})
    assert (400, next(iter(fields))) == (told["status"], told["param"])
    assert "needs exit rule 'trace'" in told["message"]
