"""A link read by an event loop: everything arrives, in order, and a handler that fails is not the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epicycle.transport.attach import attach
from epicycle.transport.errors import LinkFull
from epicycle.transport.link import DRAIN_LIMIT, Fabric, Receiver, Sender
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.request import Cancel, ToControl
from epicycle.transport.zmq_link import ZmqFabric

DEADLINE_S = 20.0


@pytest.fixture(params=["local", "zmq"])
async def fabric(request: pytest.FixtureRequest, short_dir: Path) -> AsyncIterator[Fabric]:
    made: Fabric = LocalFabric() if request.param == "local" else ZmqFabric(short_dir)
    yield made
    made.close()


def pair(fabric: Fabric, link: str = "cancel") -> tuple[Receiver[object], Sender]:
    receiver = fabric.bind("control", 1, link, ToControl)
    return receiver, fabric.connect(receiver.address)


async def put(sender: Sender, message: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return sender.send(message)
            except LinkFull:
                await asyncio.sleep(0)


async def test_what_arrived_before_attaching_is_seen(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    await put(sender, Cancel(1))
    await put(sender, Cancel(2))
    seen: list[Any] = []
    arrived = asyncio.Event()

    def handler(batch: list[Any]) -> None:
        seen.extend(batch)
        if len(seen) == 2:
            arrived.set()

    attachment = attach(asyncio.get_running_loop(), receiver, handler)
    async with asyncio.timeout(DEADLINE_S):
        await arrived.wait()
    attachment.close()

    assert [Cancel(1), Cancel(2)] == seen


async def test_attach_reads_more_than_one_drain_holds() -> None:
    fabric = LocalFabric(limit=3 * DRAIN_LIMIT)
    receiver, sender = pair(fabric)
    count = 2 * DRAIN_LIMIT + 5
    for rid in range(count):
        sender.send(Cancel(rid))
    sizes: list[int] = []
    done = asyncio.Event()

    def handler(batch: list[Any]) -> None:
        sizes.append(len(batch))
        if sum(sizes) == count:
            done.set()

    attachment = attach(asyncio.get_running_loop(), receiver, handler)
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    assert [DRAIN_LIMIT, DRAIN_LIMIT, 5] == sizes
    attachment.close()
    fabric.close()


async def test_a_handler_that_raises_is_reported_and_reading_goes_on(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    loop = asyncio.get_running_loop()
    reported: list[str] = []
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    seen: asyncio.Queue[Any] = asyncio.Queue()

    def handler(batch: list[Any]) -> None:
        for message in batch:
            seen.put_nowait(message)
        if Cancel(1) in batch:
            raise RuntimeError("handler broke")

    attachment = attach(loop, receiver, handler)
    await put(sender, Cancel(1))
    assert Cancel(1) == await asyncio.wait_for(seen.get(), DEADLINE_S)
    await put(sender, Cancel(2))
    assert Cancel(2) == await asyncio.wait_for(seen.get(), DEADLINE_S)
    assert ["handler broke"] == reported
    attachment.close()


async def test_a_closed_attachment_hands_over_nothing_more(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    seen: list[Any] = []
    attachment = attach(asyncio.get_running_loop(), receiver, seen.extend)
    attachment.close()
    attachment.close()
    await put(sender, Cancel(1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert [] == seen
