"""The ROUTER end: replies, slow peers, vanished peers, stray bytes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from epicycle.transport.dealer import Dealer
from epicycle.transport.errors import AddressError, LinkClosed
from epicycle.transport.router import Router
from epicycle.transport.wire.client import Abort, Done, Failed, FromClient, ToClient

DEADLINE_S = 20.0
LIMIT = 8
BULK = b"x" * 200_000


class Server:
    """A router that writes down what it is told."""

    def __init__(self, path: Path) -> None:
        self.heard: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self.slow: list[bytes] = []
        self.gone: list[bytes] = []
        self.router = Router(
            path,
            FromClient,
            on_message=lambda peer, message: self.heard.put_nowait((peer, message)),
            on_slow=self.slow.append,
            on_gone=self.gone.append,
            peer_limit=LIMIT,
            high_water=2,
        )

    async def hear(self) -> tuple[bytes, Any]:
        return await asyncio.wait_for(self.heard.get(), DEADLINE_S)


class Peer:
    def __init__(self, address: str) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.dealer = Dealer(address, ToClient, on_message=self.heard.put_nowait, on_lost=self.lost.set)

    async def hear(self, count: int) -> list[Any]:
        return [await asyncio.wait_for(self.heard.get(), DEADLINE_S) for _ in range(count)]


@pytest.fixture
async def server(short_dir: Path) -> AsyncIterator[Server]:
    made = Server(short_dir / "client")
    yield made
    made.router.close()


@pytest.fixture
async def peer(server: Server) -> AsyncIterator[Peer]:
    made = Peer(server.router.address)
    assert await made.dealer.wait_connected(DEADLINE_S)
    yield made
    made.dealer.close()


async def until(happened: Callable[[], bool]) -> None:
    """Turn the loop until `happened` or fail at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        for _ in itertools.count():
            if happened():
                return
            await asyncio.sleep(0)


async def mute_client(server: Server) -> tuple[zmq.Context[Any], zmq.Socket[Any], bytes]:
    """A connected client that says one thing and never reads."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 2)
    socket.connect(server.router.address)
    socket.send(b"\x92\x3d\x07")  # Abort(7)
    identity, message = await server.hear()
    assert Abort(7) == message
    return context, socket, identity


async def test_a_question_is_answered_to_the_one_who_asked(server: Server, peer: Peer) -> None:
    other = Peer(server.router.address)
    assert await other.dealer.wait_connected(DEADLINE_S)
    for number, asker in enumerate([peer, other]):
        asker.dealer.send(Abort(number))
        identity, message = await server.hear()
        assert Abort(number) == message
        assert server.router.send(identity, Done(number, b"{}"))
        assert [Done(number, b"{}")] == await asker.hear(1)
    other.dealer.close()


async def test_replies_between_questions_lose_no_question(server: Server, peer: Peer) -> None:
    peer.dealer.send(Abort(0))
    identity, _ = await server.hear()
    for number in range(1, 50):
        peer.dealer.send(Abort(number))
        server.router.send(identity, Done(number, b"{}"))  # eats the edge of the question
        assert (identity, Abort(number)) == await server.hear()
    assert 49 == len(await peer.hear(49))


async def test_a_slow_peer_is_named_once_and_the_others_go_on(server: Server, peer: Peer) -> None:
    context, socket, slow = await mute_client(server)
    try:
        taken = 0
        while server.router.send(slow, Done(taken, BULK)):
            taken += 1
            assert taken < 1000, "there is no bound"
        assert not server.router.send(slow, Done(taken, BULK))
        assert ([slow], LIMIT, 2) == (server.slow, server.router.pending(slow), server.router.stats.rejected)
        peer.dealer.send(Abort(1))
        identity, _ = await server.hear()
        assert server.router.send(identity, Done(1, b"{}"))
        assert [Done(1, b"{}")] == await peer.hear(1)
    finally:
        socket.close(0)
        context.term()


async def test_a_slow_peer_that_reads_again_gets_everything_in_order(server: Server) -> None:
    context, socket, slow = await mute_client(server)
    try:
        taken = 0
        while server.router.send(slow, Done(taken, BULK)):
            taken += 1
        assert server.router.send(slow, Failed(taken, 503, "slow_client", "too slow"), is_terminal=True)
        assert LIMIT + 1 == server.router.pending(slow)
        frames = await asyncio.to_thread(receive, socket, taken + 1)
        assert [b"\x93\x3f" + bytes([number]) for number in range(taken)] == [frame[:3] for frame in frames[:-1]]
        assert b"slow_client" in frames[-1]
        await until(lambda: server.router.pending(slow) == 0)
        assert server.router.send(slow, Done(0, b""))
    finally:
        socket.close(0)
        context.term()


def receive(socket: zmq.Socket[Any], count: int) -> list[bytes]:
    frames = []
    for _ in range(count):
        assert socket.poll(DEADLINE_S * 1000)
        frames.append(socket.recv())
    return frames


async def test_a_vanished_peer_is_reported_at_the_next_send(server: Server, peer: Peer) -> None:
    peer.dealer.send(Abort(1))
    identity, _ = await server.hear()
    peer.dealer.close()
    await until(lambda: not server.router.send(identity, Done(1, b"")))
    assert [identity] == server.gone
    assert 0 == server.router.pending(identity)


async def test_an_unknown_peer_is_gone(server: Server) -> None:
    assert not server.router.send(b"nobody", Done(1, b""))
    assert [b"nobody"] == server.gone


async def test_forgetting_drops_what_waits(server: Server) -> None:
    context, socket, slow = await mute_client(server)
    while server.router.send(slow, Done(0, BULK)):
        pass
    server.router.forget(slow)
    assert 0 == server.router.pending(slow)
    socket.close(0)
    context.term()


async def test_stray_bytes_are_dropped_and_counted(server: Server, peer: Peer) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.router.address)
    socket.send(b"garbage")
    socket.send_multipart([b"", b"two parts"])
    socket.send(b"\x92\x3d\x01")
    assert Abort(1) == (await server.hear())[1]
    assert (1, 2) == (server.router.stats.messages, server.router.stats.rejected)
    socket.close(0)
    context.term()


async def test_a_dealer_learns_that_its_peer_went_away(server: Server, peer: Peer) -> None:
    peer.dealer.send(Abort(1))
    identity, _ = await server.hear()
    server.router.send(identity, Done(1, b""))
    await peer.hear(1)
    server.router.close()
    await asyncio.wait_for(peer.lost.wait(), DEADLINE_S)


async def test_a_closed_router_raises_and_leaves_no_file(server: Server, short_dir: Path) -> None:
    server.router.close()
    server.router.close()
    with pytest.raises(LinkClosed):
        server.router.send(b"x", Done(1, b""))
    assert [] == os.listdir(short_dir)


async def test_a_bound_path_is_refused(server: Server, short_dir: Path) -> None:
    with pytest.raises(AddressError, match="bound before"):
        Server(short_dir / "client")
