"""The embeddable clients against a gateway made of a Router and a script."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epicycle.transport.client import AsyncClient, Client, ClientError
from epicycle.transport.router import Router
from epicycle.transport.rundir import Instance, RunDir
from epicycle.transport.wire.client import Abort, Done, Event, Failed, FromClient, Generate
from epicycle.transport.wire.columns import I32, U16, pack
from epicycle.transport.wire.control import HealthQuery, HealthReply

DEADLINE_S = 20.0
Script = Callable[["FakeGateway", bytes, Generate], None]


def event(ref: int, text: str, ids: list[int], finish: str = "", index: int = 0, **more: Any) -> Event:
    return Event(ref, index, text, pack(I32, ids), pack(U16, [4] * len(ids)), finish, **more)


def answer(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
    gateway.router.send(peer, event(message.ref, "two", [11, 12]))
    gateway.router.send(peer, event(message.ref, " words", [13], "length"))
    gateway.router.send(peer, Done(message.ref, b'{"prompt_tokens":1,"completion_tokens":3}'))


def first_token_only(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
    gateway.router.send(peer, event(message.ref, "a", [1]))


def silence(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
    """Ask for ever."""


class FakeGateway:
    """Answers by script; remembers what it was asked."""

    def __init__(self, run_dir: Path, script: Script, epoch: int = 1) -> None:
        self.script = script
        self.asked: list[Generate] = []
        self.aborted: asyncio.Queue[int] = asyncio.Queue()
        self.router = Router(
            run_dir / f"gw0.e{epoch}.client",
            FromClient,
            on_message=self.on_message,
            on_slow=lambda peer: None,
            on_gone=lambda peer: None,
        )

    def on_message(self, peer: bytes, message: Generate | Abort) -> None:
        match message:
            case Generate():
                self.asked.append(message)
                self.script(self, peer, message)
            case Abort(ref=ref):
                self.aborted.put_nowait(ref)


class FakeServer:
    """A published run directory with one gateway, and a supervisor that only knows its health."""

    def __init__(self, path: Path, script: Script) -> None:
        self.run_dir = RunDir.create(8000, explicit=str(path))
        self.gateway = FakeGateway(path, script)
        self.supervisor = Router(
            path / "supervisor",
            HealthQuery,
            on_message=self.on_query,
            on_slow=lambda peer: None,
            on_gone=lambda peer: None,
        )
        self.publish()

    def on_query(self, peer: bytes, query: HealthQuery) -> None:
        status = "healthy" if query.is_deep else "degraded"
        self.supervisor.send(peer, HealthReply(query.ref, status, "running", [], []))

    def publish(self) -> None:
        endpoints = {"gw0.client": self.gateway.router.address, "supervisor": self.supervisor.address}
        self.run_dir.publish(Instance(version="1", port=8000, run_dir=str(self.run_dir.path), endpoints=endpoints))

    def restart_gateway(self, script: Script) -> None:
        self.gateway.router.close()
        self.gateway = FakeGateway(self.run_dir.path, script, epoch=2)
        self.publish()

    def close(self) -> None:
        self.gateway.router.close()
        self.supervisor.close()
        self.run_dir.close()


@pytest.fixture
async def server(short_dir: Path) -> AsyncIterator[FakeServer]:
    made = FakeServer(short_dir, answer)
    yield made
    made.close()


@pytest.fixture
async def client(short_dir: Path, server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(run_dir=short_dir, timeout_s=DEADLINE_S) as made:
        yield made


async def test_generate_adds_the_events_up(client: AsyncClient, server: FakeServer) -> None:
    result = await client.generate([5, 6], max_tokens=3)
    assert ("two words", [11, 12, 13], [4, 4, 4]) == (result.text, result.token_ids, result.exit_depths)
    assert ("length", {"prompt_tokens": 1, "completion_tokens": 3}) == (result.finish_reason, result.usage)
    assert "completions" == server.gateway.asked[0].kind
    assert {"prompt": [5, 6], "max_tokens": 3} == msgspec.json.decode(server.gateway.asked[0].body)


async def test_a_traceparent_travels_beside_the_body(client: AsyncClient, server: FakeServer) -> None:
    await client.generate("a", traceparent="00-1-2-01")
    (asked,) = server.gateway.asked
    assert ("00-1-2-01", {"prompt": "a"}) == (asked.traceparent, msgspec.json.decode(asked.body))


async def test_chat_sends_the_messages_and_the_fields(client: AsyncClient, server: FakeServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "two words" == (await client.chat(messages, min_loops=2)).text
    assert "chat" == server.gateway.asked[0].kind
    assert {"messages": messages, "min_loops": 2} == msgspec.json.decode(server.gateway.asked[0].body)


async def test_a_stream_yields_event_by_event(client: AsyncClient) -> None:
    assert [("two", ""), (" words", "length")] == [(e.text, e.finish_reason) async for e in client.stream("x")]


async def test_choices_are_kept_apart_and_in_order(client: AsyncClient, server: FakeServer) -> None:
    def script(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
        gateway.router.send(peer, event(message.ref, "B", [2], "stop", index=1, stop_reason="x"))
        gateway.router.send(peer, event(message.ref, "A", [1], "length", prompt_ids=pack(I32, [9]), logprobs=b"[0.5]"))
        gateway.router.send(peer, Done(message.ref, b"{}"))

    server.gateway.script = script
    choices = (await client.generate("x", n=2)).choices
    assert [(0, "A", "length", ""), (1, "B", "stop", "x")] == [
        (choice.index, choice.text, choice.finish_reason, choice.stop_reason) for choice in choices
    ]
    assert ([9], [[0.5]]) == (choices[0].prompt_token_ids, choices[0].logprobs)


async def test_many_requests_share_the_connection(client: AsyncClient, server: FakeServer) -> None:
    results = await asyncio.gather(*(client.generate(str(number)) for number in range(50)))
    assert ["two words"] * 50 == [result.text for result in results]
    assert 50 == len({message.ref for message in server.gateway.asked})


async def test_a_refusal_carries_the_servers_code(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = lambda gateway, peer, message: gateway.router.send(
        peer, Failed(message.ref, 400, "context_length_exceeded", "9 tokens, the limit is 8")
    )
    with pytest.raises(ClientError, match="the limit is 8") as raised:
        await client.generate("x")
    assert ("context_length_exceeded", 400) == (raised.value.code, raised.value.status)


async def test_a_cancelled_stream_ends_and_the_server_learns(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = first_token_only
    stream = client.stream("x")
    assert "a" == (await anext(stream)).text
    stream.cancel()
    assert [] == [item async for item in stream]
    result = await stream.result()
    assert ("a", "cancelled") == (result.text, result.finish_reason)
    assert stream.ref == await asyncio.wait_for(server.gateway.aborted.get(), DEADLINE_S)


async def test_a_cancel_wakes_the_reader(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = first_token_only
    stream = client.stream("x")
    await anext(stream)
    reader = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    stream.cancel()
    assert "cancelled" == (await asyncio.wait_for(reader, DEADLINE_S)).finish_reason


async def test_leaving_the_block_cancels_what_runs(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = first_token_only
    async with client.stream("x") as stream:
        await anext(stream)
    assert stream.ref == await asyncio.wait_for(server.gateway.aborted.get(), DEADLINE_S)


async def test_a_stream_never_started_sends_nothing(client: AsyncClient, server: FakeServer) -> None:
    client.stream("x").cancel()
    await client.generate("y")
    assert (1, 0) == (len(server.gateway.asked), server.gateway.aborted.qsize())


async def test_a_dropped_stream_is_aborted_at_its_next_event(client: AsyncClient, server: FakeServer) -> None:
    peers: list[bytes] = []

    def script(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
        peers.append(peer)
        first_token_only(gateway, peer, message)

    server.gateway.script = script
    stream = client.stream("x")
    await anext(stream)
    ref = stream.ref
    del stream
    gc.collect()
    server.gateway.router.send(peers[0], event(ref, "late", [2]))
    assert ref == await asyncio.wait_for(server.gateway.aborted.get(), DEADLINE_S)


async def test_a_request_without_end_times_out_and_is_aborted(short_dir: Path, server: FakeServer) -> None:
    server.gateway.script = silence
    async with AsyncClient(run_dir=short_dir, timeout_s=0.05) as client:
        with pytest.raises(ClientError, match="timeout_s") as raised:
            await client.generate("x")
        assert ("timeout", 504) == (raised.value.code, raised.value.status)
        assert 1 == await asyncio.wait_for(server.gateway.aborted.get(), DEADLINE_S)


async def test_a_gateway_that_goes_away_fails_what_was_in_flight(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = first_token_only
    streams = [client.stream("x"), client.stream("y")]
    for stream in streams:
        await anext(stream)
    server.restart_gateway(answer)
    for stream in streams:
        with pytest.raises(ClientError) as raised:
            await asyncio.wait_for(stream.result(), DEADLINE_S)
        assert ("engine_lost", 503) == (raised.value.code, raised.value.status)


async def test_the_next_request_finds_the_restarted_gateway(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.script = first_token_only
    stream = client.stream("x")
    await anext(stream)
    server.restart_gateway(answer)
    with pytest.raises(ClientError, match="went away"):
        await asyncio.wait_for(stream.result(), DEADLINE_S)
    assert "two words" == (await client.generate("x")).text
    assert 1 == len(server.gateway.asked)


async def test_no_gateway_within_the_connect_timeout_is_an_error(short_dir: Path, server: FakeServer) -> None:
    server.gateway.router.close()
    async with AsyncClient(run_dir=short_dir, connect_timeout_s=0.05) as client:
        with pytest.raises(ClientError, match="connect_timeout_s") as raised:
            await client.generate("x")
    assert ("not_ready", 503) == (raised.value.code, raised.value.status)


async def test_no_server_is_an_error_that_names_the_folder(short_dir: Path) -> None:
    async with AsyncClient(run_dir=short_dir) as client:
        with pytest.raises(ClientError, match=str(short_dir)) as raised:
            await client.generate("x")
    assert "unreachable" == raised.value.code


async def test_a_request_that_could_not_start_ends_and_stays_ended(short_dir: Path) -> None:
    async with AsyncClient(run_dir=short_dir) as client:
        stream = client.stream("x")
        with pytest.raises(ClientError):
            await anext(stream)
        assert [] == [item async for item in stream]


async def test_a_published_address_that_is_not_ipc_is_an_error(short_dir: Path, server: FakeServer) -> None:
    endpoints = {"gw0.client": "tcp://127.0.0.1:1"}
    server.run_dir.publish(Instance(version="1", port=8000, run_dir=str(short_dir), endpoints=endpoints))
    async with AsyncClient(run_dir=short_dir) as client:
        with pytest.raises(ClientError, match="tcp://"):
            await client.generate("x")
        with pytest.raises(ClientError, match="supervisor endpoint"):
            await client.health()


async def test_a_reader_that_falls_behind_is_cut_off(
    client: AsyncClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(gateway: FakeGateway, peer: bytes, message: Generate) -> None:
        for token in range(10):
            gateway.router.send(peer, event(message.ref, "a", [token]))

    monkeypatch.setattr("epicycle.transport.async_client.UNREAD_EVENTS", 3)
    server.gateway.script = script
    stream = client.stream("x")
    await anext(stream)
    assert stream.ref == await asyncio.wait_for(server.gateway.aborted.get(), DEADLINE_S)
    with pytest.raises(ClientError) as raised:
        await asyncio.wait_for(stream.result(), DEADLINE_S)
    assert "slow_client" == raised.value.code


async def test_a_closed_client_refuses(client: AsyncClient) -> None:
    await client.close()
    with pytest.raises(ClientError, match="closed"):
        await client.generate("x")


async def test_health_is_the_supervisors_answer(client: AsyncClient) -> None:
    assert "degraded" == (await client.health()).status
    assert "healthy" == (await client.health(is_deep=True)).status


async def test_health_works_without_a_gateway(client: AsyncClient, server: FakeServer) -> None:
    server.gateway.router.close()
    assert "degraded" == (await client.health()).status


async def test_health_has_a_deadline(client: AsyncClient, server: FakeServer) -> None:
    server.supervisor.close()
    with pytest.raises(ClientError, match=r"within 0\.05 s"):
        await client.health(timeout_s=0.05)


@contextmanager
def serving(path: Path, script: Script) -> Iterator[FakeServer]:
    """A fake server on a loop in a thread of its own, for the blocking client."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeServer:
        return FakeServer(path, script)

    async def stop(server: FakeServer) -> None:
        server.close()

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(DEADLINE_S)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


def test_the_blocking_client_generates_chats_and_streams(short_dir: Path) -> None:
    with serving(short_dir, answer), Client(run_dir=short_dir, timeout_s=DEADLINE_S) as client:
        assert "two words" == client.generate("x").text
        assert [11, 12, 13] == client.chat([{"role": "user", "content": "x"}]).token_ids
        assert ["two", " words"] == [item.text for item in client.stream("x")]
        assert "length" == client.stream_chat([]).result().finish_reason
        assert "degraded" == client.health().status


def test_the_blocking_client_cancels(short_dir: Path) -> None:
    with (
        serving(short_dir, first_token_only) as server,
        Client(run_dir=short_dir, timeout_s=DEADLINE_S) as client,
        client.stream("x") as stream,
    ):
        assert "a" == next(stream).text
        stream.cancel()
        assert [] == list(stream)
        assert "cancelled" == stream.result().finish_reason
        assert "degraded" == client.health().status
        assert 1 == len(server.gateway.asked)


def test_a_closed_blocking_client_refuses(short_dir: Path) -> None:
    client = Client(run_dir=short_dir)
    client.close()
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.generate("x")


def test_importing_the_client_loads_neither_torch_nor_aiohttp() -> None:
    probe = (
        "import sys, epicycle; epicycle.Client; print([m for m in ('torch', 'aiohttp', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    assert "[]" == result.stdout.strip()
