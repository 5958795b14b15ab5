"""One suite for both fabrics: what an actor may rely on whichever of them carries its messages."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from epicycle.transport.codec import MAX_FRAME_BYTES
from epicycle.transport.doorbell import Doorbell, wait_readable
from epicycle.transport.errors import AddressError, LinkClosed, LinkFull, WireError
from epicycle.transport.link import Fabric, Receiver, Sender
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.control import Drain, Stop
from epicycle.transport.wire.request import Cancel, ToControl
from epicycle.transport.zmq_link import PATH_LIMIT_BYTES, ZmqFabric, ipc_address

DEADLINE_S = 20.0
SMALL = 8  # high-water mark of the fabrics under test

Make = Callable[[], Fabric]


@pytest.fixture(params=["local", "zmq"])
def fabric(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[Fabric]:
    made: Fabric = LocalFabric(limit=4 * SMALL) if request.param == "local" else ZmqFabric(short_dir, high_water=SMALL)
    yield made
    made.close()


def until(happened: Callable[[], bool]) -> None:
    """Spin until `happened` or fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, "the deadline passed"
        os.sched_yield()


def accepted(sender: Sender, message: Wire) -> bool:
    try:
        sender.send(message)
    except LinkFull:
        return False
    return True


def put(sender: Sender, message: Wire) -> None:
    until(lambda: accepted(sender, message))


def take(receiver: Receiver[object], count: int, limit: int = 1024) -> list[Any]:
    got: list[Any] = []

    def enough() -> bool:
        got.extend(receiver.drain(limit))
        return len(got) >= count

    until(enough)
    return got


def pair(fabric: Fabric, link: str = "cancel") -> tuple[Receiver[object], Sender]:
    receiver = fabric.bind("control", 1, link, ToControl)
    return receiver, fabric.connect(receiver.address)


def test_messages_arrive_whole_and_in_order(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    got: list[object] = []
    for rid in range(200):
        put(sender, Cancel(rid))
        got += receiver.drain()
    got += take(receiver, 200 - len(got))
    assert [Cancel(rid) for rid in range(200)] == got


def test_an_empty_receiver_drains_to_nothing_at_once(fabric: Fabric) -> None:
    receiver, _ = pair(fabric)
    assert [] == receiver.drain()


def test_an_absent_peer_refuses_every_message(fabric: Fabric) -> None:
    receiver = fabric.bind("control", 1, "cancel", ToControl)
    sender = fabric.connect(receiver.address.replace("e1", "e2"))
    for rid in range(10):
        with pytest.raises(LinkFull, match=r"control\.e2\.cancel"):
            sender.send(Cancel(rid))
    assert (0, 10) == (sender.stats.messages, sender.stats.rejected)


def test_a_peer_that_never_reads_fills_the_link_and_loses_nothing(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    put(sender, Cancel(0))
    payload = "x" * 200_000  # the kernel's socket buffer counts too, so messages are large
    sent = 1
    refused_in_a_row = 0
    while refused_in_a_row < 200:
        assert sent < 1000, "the link has no bound"
        if accepted(sender, Cancel(sent, payload)):
            sent, refused_in_a_row = sent + 1, 0
        else:
            refused_in_a_row += 1
            os.sched_yield()
    assert list(range(sent)) == [message.rid for message in take(receiver, sent)]
    put(sender, Cancel(sent))
    assert [Cancel(sent)] == take(receiver, 1)


def test_a_drain_stops_at_its_limit_and_the_next_goes_on(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    for rid in range(7):
        put(sender, Cancel(rid))
    assert receiver.wait(DEADLINE_S)
    first = take(receiver, 1, limit=3)
    assert len(first) <= 3
    assert [Cancel(rid) for rid in range(7)] == first + take(receiver, 7 - len(first), limit=3)


def test_two_senders_keep_their_own_order(fabric: Fabric) -> None:
    receiver, one = pair(fabric)
    other = fabric.connect(receiver.address)
    for number in range(10):
        put(one, Cancel(number, "one"))
        put(other, Cancel(number, "other"))
    got = take(receiver, 20)
    assert list(range(10)) == [message.rid for message in got if message.cause == "one"]
    assert list(range(10)) == [message.rid for message in got if message.cause == "other"]


def test_both_ends_count(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    for rid in range(5):
        put(sender, Cancel(rid))
    take(receiver, 5)
    assert (5, 5, 0) == (sender.stats.messages, receiver.stats.messages, receiver.stats.rejected)


def test_a_stray_message_is_dropped_and_counted(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    put(sender, Drain(deadline_ms=5))  # a tag that this inbox doesn't know
    put(sender, Cancel(1))
    assert [Cancel(1)] == take(receiver, 1)
    assert (1, 1) == (receiver.stats.messages, receiver.stats.rejected)


def test_a_message_over_the_frame_cap_is_refused_by_the_sender(fabric: Fabric) -> None:
    _, sender = pair(fabric)
    with pytest.raises(WireError, match=str(MAX_FRAME_BYTES)):
        sender.send(Stop("x" * (MAX_FRAME_BYTES + 1)))


def test_an_address_is_never_bound_twice(fabric: Fabric) -> None:
    receiver, _ = pair(fabric)
    with pytest.raises(AddressError, match="epoch"):
        fabric.bind("control", 1, "cancel", ToControl)
    receiver.close()
    with pytest.raises(AddressError, match="epoch"):
        fabric.bind("control", 1, "cancel", ToControl)
    assert receiver.address != fabric.bind("control", 2, "cancel", ToControl).address


def test_a_foreign_address_is_refused(fabric: Fabric) -> None:
    with pytest.raises(AddressError, match="tcp://"):
        fabric.connect("tcp://127.0.0.1:1")


def test_a_closed_sender_raises(fabric: Fabric) -> None:
    _, sender = pair(fabric)
    sender.close()
    sender.close()
    with pytest.raises(LinkClosed):
        sender.send(Cancel(1))


def test_a_closed_receiver_raises_and_its_senders_find_it_absent(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    put(sender, Cancel(1))
    take(receiver, 1)
    receiver.close()
    receiver.close()
    with pytest.raises(LinkClosed):
        receiver.drain()
    until(lambda: not accepted(sender, Cancel(2)))


def test_what_a_dead_incarnation_was_sent_never_reaches_the_next(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    put(sender, Cancel(1, "for the first"))
    receiver.close()
    following = fabric.bind("control", 2, "cancel", ToControl)
    put(fabric.connect(following.address), Cancel(2, "for the second"))
    assert [Cancel(2, "for the second")] == take(following, 1)
    assert [] == following.drain()


def test_a_thread_that_waits_is_woken(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(receiver.wait(DEADLINE_S)))
    thread.start()
    put(sender, Cancel(1))
    thread.join(DEADLINE_S)
    assert [True] == woken
    assert [Cancel(1)] == take(receiver, 1)


def test_a_wait_with_nothing_to_see_ends_false(fabric: Fabric) -> None:
    receiver, _ = pair(fabric)
    assert not receiver.wait(0.0)
    assert not receiver.wait(0.001)


def test_a_wait_after_a_capped_drain_sees_the_rest(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    for rid in range(3):
        put(sender, Cancel(rid))
    assert [Cancel(0)] == take(receiver, 1, limit=1)
    assert receiver.wait(DEADLINE_S)


def test_a_thread_can_wait_for_a_receiver_and_a_doorbell(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    doorbell = Doorbell()
    try:
        while wait_readable([receiver, doorbell], 0.0):
            receiver.drain()  # the handshake of a connecting peer rings too
        threading.Thread(target=doorbell.ring).start()
        assert wait_readable([receiver, doorbell], DEADLINE_S)
        until(doorbell.silence)
        put(sender, Cancel(1))
        until(lambda: wait_readable([receiver, doorbell], DEADLINE_S) and bool(receiver.drain()))
    finally:
        doorbell.close()


async def test_add_reader_sees_a_burst_larger_than_one_drain(fabric: Fabric) -> None:
    receiver, sender = pair(fabric)
    loop = asyncio.get_running_loop()
    got: list[Any] = []
    done = asyncio.Event()

    def on_readable() -> None:
        batch = receiver.drain(2)
        got.extend(batch)
        if len(batch) == 2:
            loop.call_soon(on_readable)
        if len(got) == 60:
            done.set()

    loop.add_reader(receiver.fileno(), on_readable)
    loop.call_soon(on_readable)
    thread = threading.Thread(target=lambda: [put(sender, Cancel(rid)) for rid in range(60)])
    thread.start()
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    await asyncio.to_thread(thread.join, DEADLINE_S)
    loop.remove_reader(receiver.fileno())
    assert list(range(60)) == [message.rid for message in got]


# What only the ZeroMQ fabric has: files, other processes' bytes.


def test_a_path_over_the_kernel_limit_is_refused_with_its_length(short_dir: Path) -> None:
    fabric = ZmqFabric(short_dir / ("d" * PATH_LIMIT_BYTES))
    with pytest.raises(AddressError, match=f"limit is {PATH_LIMIT_BYTES}"):
        fabric.bind("control", 1, "cancel", ToControl)
    with pytest.raises(AddressError, match=f"limit is {PATH_LIMIT_BYTES}"):
        fabric.connect("ipc:///" + "d" * PATH_LIMIT_BYTES)
    fabric.close()


def test_the_longest_path_that_fits_can_be_bound(short_dir: Path) -> None:
    name = "control.e1.cancel"
    folder = short_dir / ("d" * (PATH_LIMIT_BYTES - len(str(short_dir)) - len(name) - 2))
    folder.mkdir()
    assert PATH_LIMIT_BYTES == len(str(folder / name))
    fabric = ZmqFabric(folder)
    assert ipc_address(folder / name) == fabric.bind("control", 1, "cancel", ToControl).address
    fabric.close()


def test_a_second_process_cannot_take_over_a_bound_path(short_dir: Path) -> None:
    first, second = ZmqFabric(short_dir), ZmqFabric(short_dir)
    first.bind("control", 1, "cancel", ToControl)
    with pytest.raises(AddressError, match="bound before"):
        second.bind("control", 1, "cancel", ToControl)
    first.close()
    second.close()


def test_closing_removes_the_socket_file(short_dir: Path) -> None:
    fabric = ZmqFabric(short_dir)
    fabric.bind("control", 1, "cancel", ToControl)
    assert ["control.e1.cancel"] == [path.name for path in short_dir.iterdir()]
    fabric.close()
    assert [] == list(short_dir.iterdir())


@pytest.mark.parametrize("parts", [[b"\x93garbage"], [b""], [b"\x92\x02\x01", b"second"]])
def test_malformed_frames_are_dropped_and_counted(short_dir: Path, parts: list[bytes]) -> None:
    fabric = ZmqFabric(short_dir)
    receiver, sender = pair(fabric)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(receiver.address)
        stranger.send_multipart(parts)
        until(lambda: not receiver.drain() and receiver.stats.rejected == 1)
    put(sender, Cancel(7))
    assert [Cancel(7)] == take(receiver, 1)
    fabric.close()


CHILD = """
import sys
from pathlib import Path
from epicycle.transport.wire.request import ToControl
from epicycle.transport.zmq_link import ZmqFabric
receiver = ZmqFabric(Path(sys.argv[1])).bind("control", 1, "cancel", ToControl)
while not receiver.drain():
    receiver.wait(1.0)
print("heard", flush=True)
sys.stdin.read()
"""


def test_a_killed_receiver_is_absent_and_its_path_stays_taken(short_dir: Path) -> None:
    fabric = ZmqFabric(short_dir)
    command = [sys.executable, "-c", CHILD, str(short_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        sender = fabric.connect(ipc_address(short_dir / "control.e1.cancel"))
        put(sender, Cancel(1))
        assert child.stdout is not None
        assert b"heard\n" == child.stdout.readline()
        child.kill()
    until(lambda: not accepted(sender, Cancel(2)))
    with pytest.raises(AddressError, match="bound before"):
        fabric.bind("control", 1, "cancel", ToControl)
    following = fabric.bind("control", 2, "cancel", ToControl)
    put(fabric.connect(following.address), Cancel(3))
    assert [Cancel(3)] == take(following, 1)
    fabric.close()


def test_a_link_with_unsent_messages_closes_at_once(short_dir: Path) -> None:
    fabric = ZmqFabric(short_dir, high_water=SMALL)
    _, sender = pair(fabric)
    put(sender, Cancel(0))
    for rid in range(3 * SMALL):
        accepted(sender, Cancel(rid, "x" * 200_000))
    closing = threading.Thread(target=fabric.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
