"""Reads a two-way ZeroMQ socket from an asyncio loop without missing an edge.

Owns the reader it registers. The descriptor rings on change only, and a send on the same socket eats the ring of what
has arrived: so touched() follows every send, and a capped drain goes on in the next turn. Must not know the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from epicycle.transport.link import DRAIN_LIMIT


class EdgeReader:
    """Calls on_parts(parts) for each message; every method on the loop's thread.

    An exception in on_parts goes to the loop's exception handler and reading goes on. on_parts may close the reader.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], on_parts: Callable[[list[bytes]], None]
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_parts = on_parts
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_scheduled = False
        self._is_closed = False
        loop.add_reader(self._fd, self.drain)
        self.touched()

    def touched(self) -> None:
        """Look again soon: something else was done with the socket."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def close(self) -> None:
        """Stop reading; call before the socket closes. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)

    def drain(self) -> None:
        """Hand over what has arrived, at most DRAIN_LIMIT messages; the rest in the next turn of the loop."""
        is_empty = False
        try:
            for _ in range(DRAIN_LIMIT):
                parts = self._next_parts()
                if parts is None:
                    is_empty = True
                    break
                self._on_parts(parts)
        finally:
            if not is_empty:
                self.touched()

    def _scheduled_drain(self) -> None:
        self._is_scheduled = False
        self.drain()

    def _next_parts(self) -> list[bytes] | None:
        if self._is_closed:
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
