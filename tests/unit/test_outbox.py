"""What waits for a slow peer: order, merging, the bound, and what happens when the peer goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epicycle.transport.errors import LinkFull, WireError
from epicycle.transport.link import LinkStats
from epicycle.transport.outbox import AsyncOutbox, Outbox
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.request import Cancel

DEADLINE_S = 20.0


class FakeSender:
    """Takes `room` messages, then is full."""

    def __init__(self, room: int = 1000) -> None:
        self.address = "fake"
        self.room = room
        self.sent: list[Any] = []
        self.is_closed = False
        self.stats = LinkStats()

    def send(self, message: Wire) -> None:
        if self.room == 0:
            raise LinkFull("full")
        if message == Cancel(13):
            raise WireError("too large")
        self.room -= 1
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


def cancels(*rids: int) -> list[Cancel]:
    return [Cancel(rid) for rid in rids]


def test_a_ready_link_takes_messages_at_once() -> None:
    outbox, sender = Outbox("verdicts", 4), FakeSender()
    outbox.connect(sender)
    assert outbox.push(Cancel(1))
    assert (cancels(1), 0) == (sender.sent, len(outbox))


def test_messages_wait_in_order_until_there_is_a_sender() -> None:
    outbox, sender = Outbox("verdicts", 4), FakeSender()
    assert [False, False] == [outbox.push(message) for message in cancels(1, 2)]
    assert not outbox.flush()
    outbox.connect(sender)
    assert cancels(1, 2) == sender.sent


def test_a_new_message_never_overtakes_a_waiting_one() -> None:
    outbox, sender = Outbox("verdicts", 4), FakeSender(room=0)
    outbox.connect(sender)
    outbox.push(Cancel(1))
    sender.room = 1
    assert not outbox.push(Cancel(2))
    assert cancels(1) == sender.sent
    sender.room = 1
    assert outbox.flush()
    assert cancels(1, 2) == sender.sent


def test_the_bound_raises_and_names_itself() -> None:
    outbox = Outbox("verdicts", 2)
    outbox.push(Cancel(1))
    outbox.push(Cancel(2))
    with pytest.raises(LinkFull, match="verdicts holds 2"):
        outbox.push(Cancel(3))
    assert (2, 1) == (len(outbox), outbox.refused)


def merge_pairs(last: Wire, new: Wire) -> Wire | None:
    """Adds rids; refuses above 10."""
    assert isinstance(last, Cancel)
    assert isinstance(new, Cancel)
    return Cancel(last.rid + new.rid) if last.rid + new.rid <= 10 else None


def test_waiting_messages_merge_where_the_owner_says_so() -> None:
    outbox, sender = Outbox("plan", 2, merge_pairs), FakeSender(room=0)
    outbox.connect(sender)
    for message in cancels(1, 2, 4, 8):
        outbox.push(message)
    sender.room = 10
    outbox.push(Cancel(3))
    assert cancels(7, 8, 3) == sender.sent  # 3 met an empty queue


def test_a_merge_needs_no_room() -> None:
    outbox = Outbox("plan", 1, merge_pairs)
    for message in cancels(1, 2, 3):
        outbox.push(message)
    assert cancels(6) == outbox.disconnect()


def test_a_lost_peer_gives_back_what_it_never_took() -> None:
    outbox, sender = Outbox("verdicts", 4), FakeSender(room=1)
    outbox.connect(sender)
    for message in cancels(1, 2, 3):
        outbox.push(message)
    assert cancels(2, 3) == outbox.disconnect()
    assert sender.is_closed
    assert (0, None) == (len(outbox), outbox.sender)


def test_a_new_sender_replaces_and_closes_the_old_one() -> None:
    outbox, old, new = Outbox("verdicts", 4), FakeSender(room=0), FakeSender()
    outbox.connect(old)
    outbox.push(Cancel(1))
    outbox.connect(new)
    assert old.is_closed
    assert cancels(1) == new.sent


def test_a_message_that_no_frame_holds_is_dropped_with_an_error() -> None:
    outbox, sender = Outbox("verdicts", 4), FakeSender(room=0)
    outbox.connect(sender)
    outbox.push(Cancel(13))
    outbox.push(Cancel(2))
    sender.room = 10
    with pytest.raises(WireError):
        outbox.flush()
    assert outbox.flush()
    assert cancels(2) == sender.sent


class OpeningSender(FakeSender):
    """Refuses the first `refusals` tries; `taken` is set by the first message it takes."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals
        self.taken = asyncio.Event()

    def send(self, message: Wire) -> None:
        if self.refusals:
            self.refusals -= 1
            raise LinkFull("not yet")
        super().send(message)
        self.taken.set()


async def test_an_async_outbox_retries_until_the_link_takes_it() -> None:
    outbox, sender = AsyncOutbox(Outbox("cancel", 4), retry_s=0.0001), OpeningSender(refusals=5)
    outbox.connect(sender)
    assert not outbox.push(Cancel(1))
    await asyncio.wait_for(sender.taken.wait(), DEADLINE_S)
    assert (cancels(1), 0) == (sender.sent, len(outbox))


async def test_an_async_outbox_goes_on_after_a_message_that_no_frame_holds() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    outbox, sender = AsyncOutbox(Outbox("cancel", 4), retry_s=0.0001), OpeningSender(refusals=3)
    outbox.connect(sender)
    outbox.push(Cancel(13))
    outbox.push(Cancel(1))
    await asyncio.wait_for(sender.taken.wait(), DEADLINE_S)
    assert cancels(1) == sender.sent


async def test_an_async_outbox_without_a_peer_stops_trying() -> None:
    outbox, sender = AsyncOutbox(Outbox("cancel", 4), retry_s=0.0001), OpeningSender(refusals=10**9)
    outbox.connect(sender)
    outbox.push(Cancel(1))
    assert cancels(1) == outbox.disconnect()
    assert sender.is_closed
    tries = sender.refusals
    outbox.push(Cancel(2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (tries, 1) == (sender.refusals, len(outbox))
