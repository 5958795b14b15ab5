"""What waits in front of a slow or absent peer: a bounded FIFO before a Sender, and one that retries by itself.

Owns the messages that the link has not taken yet. A ZeroMQ sender has no peer for a moment after connect and none
after a crash, so every sender that may not lose messages stands behind one of these. Must not know what they mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from epicycle.transport.errors import LinkFull
from epicycle.transport.link import Sender
from epicycle.transport.wire.base import Wire

Merge = Callable[[Wire, Wire], Wire | None]
RETRY_S = 0.005


class Outbox:
    """Bounded FIFO before a sender. One owner, any thread.

    `merge(last, new)` may fold a new message into the last one still waiting (None: keep both); it sees nothing that
    the link has taken. Without a sender everything waits.
    """

    def __init__(self, name: str, limit: int, merge: Merge | None = None) -> None:
        assert limit > 0, limit
        self.name = name
        self.limit = limit
        self.refused = 0  # pushes that raised LinkFull
        self.sender: Sender | None = None
        self._merge = merge
        self._waiting: deque[Wire] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def connect(self, sender: Sender) -> None:
        """Send through `sender` from now on; what waits goes first. The old one, if any, is closed."""
        if self.sender is not None:
            self.sender.close()
        self.sender = sender
        self.flush()

    def disconnect(self) -> list[Wire]:
        """The peer is gone: close the sender and hand back what it never took, oldest first."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None
        unsent = list(self._waiting)
        self._waiting.clear()
        return unsent

    def push(self, message: Wire) -> bool:
        """Send, merge or queue; whether nothing waits afterwards. Raises LinkFull when there is no room."""
        if self.flush() and self._try_send(message):
            return True
        self._enqueue(message)
        return False

    def flush(self) -> bool:
        """Offer what waits to the link, without waiting; whether it took everything.

        Raises WireError for a message that no frame can hold, which is dropped: it would block the rest for ever.
        """
        while self._waiting:
            message = self._waiting.popleft()
            if not self._try_send(message):
                self._waiting.appendleft(message)
                return False
        return True

    def _enqueue(self, message: Wire) -> None:
        if self._waiting and self._merge is not None:
            merged = self._merge(self._waiting[-1], message)
            if merged is not None:
                self._waiting[-1] = merged
                return
        if len(self._waiting) >= self.limit:
            self.refused += 1
            raise LinkFull(f"outbox {self.name} holds {len(self._waiting)} messages, its limit")
        self._waiting.append(message)

    def _try_send(self, message: Wire) -> bool:
        if self.sender is None:
            return False
        try:
            self.sender.send(message)
        except LinkFull:
            return False
        return True


class AsyncOutbox:
    """An Outbox that retries on its loop for as long as something waits. All methods on the loop's thread."""

    def __init__(self, outbox: Outbox, retry_s: float = RETRY_S) -> None:
        self.outbox = outbox
        self._retry_s = retry_s
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.outbox)

    def connect(self, sender: Sender) -> None:
        self.outbox.connect(sender)
        self._arm()

    def disconnect(self) -> list[Wire]:
        """As Outbox.disconnect; no retries until there is a sender again."""
        self._disarm()
        return self.outbox.disconnect()

    def push(self, message: Wire) -> bool:
        """As Outbox.push: whether nothing waits afterwards; raises LinkFull when there is no room."""
        is_sent = self.outbox.push(message)
        self._arm()
        return is_sent

    def _arm(self) -> None:
        if self._timer is None and len(self.outbox) and self.outbox.sender is not None:
            self._timer = asyncio.get_running_loop().call_later(self._retry_s, self._retry)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _retry(self) -> None:
        self._timer = None
        try:
            self.outbox.flush()
        finally:
            self._arm()
