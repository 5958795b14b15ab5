"""An actor's inbox: merging, bounds, pressure on the links, and reading that survives a handler's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epicycle.transport.errors import LinkClosed, LinkFull
from epicycle.transport.link import DRAIN_LIMIT, Fabric, Receiver, Sender
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.mailbox import Mailbox, attach
from epicycle.transport.wire.control import Drain, Stop
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


async def take(mailbox: Mailbox, count: int) -> list[Any]:
    got: list[Any] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in mailbox:
            got += batch
            if len(got) >= count:
                break
    return got


async def test_links_and_posts_meet_in_one_inbox(fabric: Fabric) -> None:
    mailbox = Mailbox("control")
    submits, submit_sender = pair(fabric, "submit")
    cancels, cancel_sender = pair(fabric, "cancel")
    mailbox.listen(submits)
    mailbox.listen(cancels)
    await put(submit_sender, Cancel(1))
    await put(cancel_sender, Cancel(2))
    mailbox.post(Drain(5))
    got = await take(mailbox, 3)
    assert {Cancel(1), Cancel(2), Drain(5)} == set(got)
    assert (3, 0) == (mailbox.stats.messages, mailbox.stats.rejected)
    mailbox.close()


async def test_one_links_messages_stay_in_order(fabric: Fabric) -> None:
    mailbox = Mailbox("control", limit=7)
    receiver, sender = pair(fabric)
    mailbox.listen(receiver)

    async def send_all() -> None:
        for rid in range(300):
            await put(sender, Cancel(rid))

    sending = asyncio.create_task(send_all())
    assert [Cancel(rid) for rid in range(300)] == await take(mailbox, 300)
    await sending
    mailbox.close()


async def test_what_arrived_before_listening_is_seen(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    await put(sender, Cancel(1))
    mailbox = Mailbox("control")
    mailbox.listen(receiver)
    assert [Cancel(1)] == await take(mailbox, 1)
    mailbox.close()


async def test_a_full_mailbox_refuses_posts_and_counts_them() -> None:
    mailbox = Mailbox("control", limit=2)
    mailbox.post(Cancel(1))
    mailbox.post(Cancel(2))
    with pytest.raises(LinkFull, match="control holds 2"):
        mailbox.post(Cancel(3))
    assert (2, 1, 2) == (mailbox.stats.messages, mailbox.stats.rejected, mailbox.stats.high_water)
    assert ("control", 2, 1) == (mailbox.stat().link, mailbox.stat().depth, mailbox.stat().rejected)


async def test_a_full_mailbox_leaves_the_rest_in_the_link() -> None:
    fabric = LocalFabric(limit=4)
    receiver, sender = pair(fabric)
    mailbox = Mailbox("control", limit=3)
    mailbox.listen(receiver)
    for rid in range(7):
        await put(sender, Cancel(rid))
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(LinkFull):
        sender.send(Cancel(7))
    assert (3, 3) == (len(mailbox), mailbox.stats.high_water)
    assert [Cancel(rid) for rid in range(7)] == await take(mailbox, 7)
    await put(sender, Cancel(7))
    assert [Cancel(7)] == await take(mailbox, 1)
    mailbox.close()
    fabric.close()


async def test_malformed_frames_show_in_the_mailboxs_figures(fabric: Fabric) -> None:
    mailbox = Mailbox("control")
    receiver, sender = pair(fabric)
    mailbox.listen(receiver)
    await put(sender, Stop("not for this inbox"))
    await put(sender, Cancel(1))
    assert [Cancel(1)] == await take(mailbox, 1)
    assert 1 == mailbox.stat().rejected
    mailbox.close()


async def test_closing_hands_out_what_is_queued_and_then_ends() -> None:
    mailbox = Mailbox("control")
    mailbox.post(Cancel(1))
    mailbox.close()
    mailbox.close()
    assert [[Cancel(1)]] == [batch async for batch in mailbox]
    with pytest.raises(LinkClosed):
        mailbox.post(Cancel(2))


async def test_closing_wakes_a_waiting_consumer() -> None:
    mailbox = Mailbox("control")

    async def consume() -> list[Any]:
        return [batch async for batch in mailbox]

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    mailbox.close()
    assert [] == await asyncio.wait_for(consumer, DEADLINE_S)


async def test_an_actor_that_posts_to_itself_leaves_the_loop_alive() -> None:
    mailbox = Mailbox("control")
    mailbox.post(0)
    rounds = 0
    others_ran = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(others_ran.set_result, None)
    async for _ in mailbox:
        rounds += 1
        if others_ran.done():
            break
        mailbox.post(rounds)
    assert rounds < 5


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
