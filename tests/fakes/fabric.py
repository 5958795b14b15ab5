"""An in-memory Fabric for tests: every message passes the codec, and a test decides which links are full.

Owns frames in flight. It has no threads and no clock: what was sent is there at once.
"""

from __future__ import annotations

import os
import select
from collections import deque
from dataclasses import dataclass, field

from epicycle.transport.codec import Decoder, encode
from epicycle.transport.errors import AddressError, LinkClosed, LinkFull, WireError
from epicycle.transport.link import DRAIN_LIMIT
from epicycle.transport.wire.base import Wire


@dataclass
class FakeStats:
    messages: int = 0
    rejected: int = 0


@dataclass
class FakeReceiver:
    """`capacity` is the number of frames it holds before senders see LinkFull; a test may change it at any time."""

    address: str
    link: str
    union: object
    capacity: int = 1 << 20
    stats: FakeStats = field(default_factory=FakeStats)

    def __post_init__(self) -> None:
        self._decoder: Decoder[Wire] = Decoder(self.union)
        self._frames: deque[bytes] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self.is_closed = False

    def put(self, frame: bytes) -> None:
        if self.is_closed or len(self._frames) >= self.capacity:
            raise LinkFull(f"{self.address} holds {len(self._frames)} frames")
        self._frames.append(frame)
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def drain(self, limit: int = DRAIN_LIMIT) -> list[Wire]:
        messages: list[Wire] = []
        while self._frames and len(messages) < limit:
            try:
                messages.append(self._decoder(self._frames.popleft()))
            except WireError:
                self.stats.rejected += 1
        self.stats.messages += len(messages)
        if not self._frames and not self.is_closed and select.select([self._event], [], [], 0)[0]:
            os.eventfd_read(self._event)
        return messages

    def wait(self, timeout_s: float) -> bool:
        return bool(self._frames) or bool(select.select([self._event], [], [], timeout_s)[0])

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._event)
            self._frames.clear()


@dataclass
class FakeSender:
    address: str
    fabric: FakeFabric
    stats: FakeStats = field(default_factory=FakeStats)
    is_closed: bool = False

    def send(self, message: Wire) -> None:
        if self.is_closed:
            raise LinkClosed(self.address)
        frame = encode(message)
        receiver = self.fabric.receivers.get(self.address)
        try:
            if receiver is None:
                raise LinkFull(f"nobody has bound {self.address}")
            receiver.put(frame)
        except LinkFull:
            self.stats.rejected += 1
            raise
        self.stats.messages += 1

    def close(self) -> None:
        self.is_closed = True


class FakeFabric:
    """`receivers` maps address -> receiver, for tests to fill or starve a link."""

    def __init__(self) -> None:
        self.receivers: dict[str, FakeReceiver] = {}

    def bind(self, owner: str, epoch: int, link: str, union: object) -> FakeReceiver:
        address = f"fake://{owner}.e{epoch}.{link}"
        if address in self.receivers:
            raise AddressError(f"{address} is bound already")
        self.receivers[address] = FakeReceiver(address, link, union)
        return self.receivers[address]

    def connect(self, address: str) -> FakeSender:
        return FakeSender(address, self)

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()
