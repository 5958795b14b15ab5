"""Links inside one process: the plain twin of zmq_link, with the same limits, errors and codec.

Owns bounded queues of encoded frames and one doorbell each, so a receiver works with add_reader and from a thread
alike. Every message passes encode and Decoder, so what works here works across processes. Must not know what the
messages mean.
"""

from __future__ import annotations

import threading
from collections import deque

from epicycle.transport.codec import Decoder, encode
from epicycle.transport.doorbell import Doorbell, wait_readable
from epicycle.transport.errors import AddressError, LinkClosed, LinkFull, WireError
from epicycle.transport.link import DRAIN_LIMIT, LinkStats, Receiver, Sender, path_name
from epicycle.transport.wire.base import Wire

SCHEME = "local:"
LIMIT_MESSAGES = 2048  # what a ZeroMQ pair holds: one high-water mark at each end


class LocalReceiver:
    """Binding end. put() is for senders, from any thread; the rest belongs to one owner."""

    def __init__(self, address: str, link: str, union: object, limit: int) -> None:
        self.address = address
        self.link = link
        self._stats = LinkStats()
        self._decode: Decoder[object] = Decoder(union)
        self._frames: deque[bytes] = deque()
        self._limit = limit
        self._lock = threading.Lock()  # the bound, and ring() against close()
        self._doorbell = Doorbell()
        self._is_closed = False

    @property
    def stats(self) -> LinkStats:
        return self._stats

    def put(self, frame: bytes) -> bool:
        """Whether there was room; False as well once closed, as for a peer that is gone."""
        with self._lock:
            if self._is_closed or len(self._frames) >= self._limit:
                return False
            self._frames.append(frame)
            self._doorbell.ring()
            return True

    def fileno(self) -> int:
        return self._doorbell.fileno()

    def drain(self, limit: int = DRAIN_LIMIT) -> list[object]:
        if self._is_closed:
            raise LinkClosed(f"{self.address} is closed")
        self._doorbell.silence()
        messages: list[object] = []
        while self._frames and len(messages) < limit:
            try:
                messages.append(self._decode(self._frames.popleft()))
            except WireError:
                self._stats.rejected += 1
        self._stats.messages += len(messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        # A capped drain has silenced the bell with frames still queued.
        return bool(self._frames) or wait_readable([self], timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._frames.clear()
            self._doorbell.close()


class LocalSender:
    """Connecting end. Finds its receiver at the first send that meets one, as a ZeroMQ socket would."""

    def __init__(self, address: str, bound: dict[str, LocalReceiver]) -> None:
        self.address = address
        self._bound = bound
        self._stats = LinkStats()
        self._is_closed = False

    @property
    def stats(self) -> LinkStats:
        return self._stats

    def send(self, message: Wire) -> None:
        if self._is_closed:
            raise LinkClosed(f"the link to {self.address} is closed")
        frame = encode(message)
        receiver = self._bound.get(self.address)
        if receiver is None or not receiver.put(frame):
            self._stats.rejected += 1
            raise LinkFull(f"{self.address} is slow or absent")
        self._stats.messages += 1

    def close(self) -> None:
        self._is_closed = True


class LocalFabric:
    """All links of a single-process server. bind, connect and close are for one thread; the ends may move to others."""

    def __init__(self, limit: int = LIMIT_MESSAGES) -> None:
        self._limit = limit
        self._bound: dict[str, LocalReceiver] = {}
        self._senders: list[LocalSender] = []

    def bind(self, owner: str, epoch: int, link: str, union: object) -> Receiver[object]:
        address = SCHEME + path_name(owner, epoch, link)
        if address in self._bound:  # closed ones too: an address belongs to one incarnation for ever
            raise AddressError(f"{address} has been bound before; a new incarnation needs a new epoch")
        receiver = LocalReceiver(address, link, union, self._limit)
        self._bound[address] = receiver
        return receiver

    def connect(self, address: str) -> Sender:
        if not address.startswith(SCHEME):
            raise AddressError(f"{address!r} is not an in-process address ({SCHEME}NAME)")
        sender = LocalSender(address, self._bound)
        self._senders.append(sender)
        return sender

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        for receiver in self._bound.values():
            receiver.close()
