"""The asyncio side of receiving: a link's descriptor turned into calls with batches of messages.

Owns the readers it registers with the loop. Must not know what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from epicycle.transport.link import DRAIN_LIMIT, Receiver

Handler = Callable[[list[Any]], None]


class Attachment:
    """One receiver read by one loop. All methods on that loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receiver: Receiver[Any], handler: Handler) -> None:
        self.receiver = receiver
        self._loop = loop
        self._fd = receiver.fileno()
        self._handler = handler
        self._is_reading = True
        self._is_scheduled = False
        loop.add_reader(self._fd, self._drain)
        self._drain_soon()  # what came before won't ring again

    def close(self) -> None:
        """Stop reading. The receiver stays open. Idempotent."""
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
        batch = self.receiver.drain(DRAIN_LIMIT)
        if len(batch) == DRAIN_LIMIT:
            self._drain_soon()  # before the handler, which may raise
        if batch:
            self._handler(batch)


def attach(loop: asyncio.AbstractEventLoop, receiver: Receiver[Any], handler: Handler) -> Attachment:
    """Call `handler` with each batch that `receiver` yields, at most DRAIN_LIMIT messages a turn of the loop.

    For handlers that never wait. Close the attachment before the receiver. An exception in the handler goes to the
    loop's exception handler and reading goes on.
    """
    return Attachment(loop, receiver, handler)
