"""The asyncio side of receiving: descriptors to callbacks (attach), and the one bounded inbox of an actor (Mailbox).

Owns the readers it registers with the loop. A full mailbox stops draining its links, so that pressure reaches the
senders as LinkFull instead of growing a queue here. Must not know what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from epicycle.transport.errors import LinkClosed, LinkFull
from epicycle.transport.link import DRAIN_LIMIT, Receiver
from epicycle.transport.wire.control import MailboxStat

Handler = Callable[[list[Any]], None]
LIMIT_MESSAGES = 4096


class Attachment:
    """One receiver read by one loop. All methods on that loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, receiver: Receiver[Any], handler: Handler, room: Callable[[], int]
    ) -> None:
        self.receiver = receiver
        self._loop = loop
        self._fd = receiver.fileno()
        self._handler = handler
        self._room = room
        self._is_closed = False
        self._is_reading = False
        self._is_scheduled = False
        self.resume()

    def resume(self) -> None:
        """Read again after the room was used up; harmless at any other time."""
        if self._is_reading or self._is_closed:
            return
        self._is_reading = True
        self._loop.add_reader(self._fd, self._drain)
        self._drain_soon()  # what came while nobody looked won't ring again

    def close(self) -> None:
        """Stop reading. The receiver stays open. Idempotent."""
        self._is_closed = True
        self._pause()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def _drain_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._is_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if not self._is_reading:
            return
        limit = min(DRAIN_LIMIT, self._room())
        if limit <= 0:
            self._pause()
            return
        batch = self.receiver.drain(limit)
        if len(batch) == limit:
            self._drain_soon()  # before the handler, which may raise
        if batch:
            self._handler(batch)


def attach(loop: asyncio.AbstractEventLoop, receiver: Receiver[Any], handler: Handler) -> Attachment:
    """Call `handler` with each batch that `receiver` yields, at most DRAIN_LIMIT messages a turn of the loop.

    For handlers that never wait. Close the attachment before the receiver. An exception in the handler goes to the
    loop's exception handler and reading goes on.
    """
    return Attachment(loop, receiver, handler, lambda: DRAIN_LIMIT)


@dataclass
class MailboxStats:
    """Totals since the mailbox was made."""

    messages: int = 0
    rejected: int = 0  # posts refused because it was full
    high_water: int = 0  # deepest it has been


class Mailbox:
    """The bounded inbox of one actor: several receivers and local posts, in order of arrival.

    One consumer: `async for batch in mailbox` yields non-empty lists and ends at close() once the queue is empty.
    Everything on the loop's thread.
    """

    def __init__(self, name: str, limit: int = LIMIT_MESSAGES) -> None:
        assert limit > 0, limit
        self.name = name
        self.limit = limit
        self.stats = MailboxStats()
        self._queue: list[Any] = []
        self._attachments: list[Attachment] = []
        self._wake = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def listen(self, receiver: Receiver[Any]) -> Attachment:
        """Merge `receiver` in. Call on the running loop; the caller keeps the receiver and closes it after close()."""
        attachment = Attachment(asyncio.get_running_loop(), receiver, self._accept, self._room)
        self._attachments.append(attachment)
        return attachment

    def post(self, message: object) -> None:
        """Add one message without waiting. Raises LinkFull at the limit and LinkClosed after close()."""
        if self._is_closed:
            raise LinkClosed(f"mailbox {self.name} is closed")
        if len(self._queue) >= self.limit:
            self.stats.rejected += 1
            raise LinkFull(f"mailbox {self.name} holds {len(self._queue)} messages, its limit")
        self._accept([message])

    def stat(self) -> MailboxStat:
        """For beats: depth now; rejected counts refused posts and malformed frames of the links."""
        malformed = sum(attachment.receiver.stats.rejected for attachment in self._attachments)
        return MailboxStat(self.name, len(self._queue), self.stats.rejected + malformed)

    def close(self) -> None:
        """No more posts and no more reading; the consumer gets what is queued, then the end. Idempotent."""
        self._is_closed = True
        for attachment in self._attachments:
            attachment.close()
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Any]]:
        return self

    async def __anext__(self) -> list[Any]:
        if self._queue:
            await asyncio.sleep(0)  # an actor that posts to itself must not starve its loop
        while not self._queue:
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        batch, self._queue = self._queue, []
        for attachment in self._attachments:
            attachment.resume()
        return batch

    def _room(self) -> int:
        return self.limit - len(self._queue)

    def _accept(self, batch: list[Any]) -> None:
        self._queue += batch
        self.stats.messages += len(batch)
        self.stats.high_water = max(self.stats.high_water, len(self._queue))
        self._wake.set()
