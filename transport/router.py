"""The many-to-one end of two-way traffic: a ROUTER that tells slow peers from vanished ones and loses nothing quietly.

Serves the supervisor's control socket and a gateway's embeddable clients. Owns the socket and one bounded buffer per
slow peer. MANDATORY turns an unknown identity into an error and a full pipe into EAGAIN (without it 16,000 of 20,000
messages vanished). Must not know what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from epicycle.transport.codec import Decoder, encode
from epicycle.transport.edge_reader import EdgeReader
from epicycle.transport.errors import LinkClosed, WireError
from epicycle.transport.link import LinkStats
from epicycle.transport.wire.base import Wire
from epicycle.transport.zmq_link import HIGH_WATER_MESSAGES, bind_fresh, open_socket

RETRY_S = 0.005
PEER_LIMIT_MESSAGES = 4096


class Router:
    """ROUTER on an asyncio loop; every method and callback on the loop's thread.

    on_message(identity, message): one decoded message; malformed ones are dropped and counted in `stats`.
    on_slow(identity): the peer's buffer is full; once per episode, the message that found it full was not taken.
    on_gone(identity): the peer has no connection; what waited for it is dropped. Seen at the next send only.
    """

    def __init__(
        self,
        path: Path,
        union: object,
        *,
        on_message: Callable[[bytes, Any], None],
        on_slow: Callable[[bytes], None],
        on_gone: Callable[[bytes], None],
        peer_limit: int = PEER_LIMIT_MESSAGES,
        high_water: int = HIGH_WATER_MESSAGES,
    ) -> None:
        """Binds at once, on the running loop. Raises AddressError for a path too long or bound before."""
        self.stats = LinkStats()
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_slow = on_slow
        self._on_gone = on_gone
        self._limit = peer_limit
        self._decode: Decoder[Any] = Decoder(union)
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._slow: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, high_water)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = self._bind()
        self._reader = EdgeReader(self._loop, self._socket, self._receive)

    def _bind(self) -> str:
        try:
            return bind_fresh(self._socket, self._path)
        except BaseException:
            self._socket.close(0)
            self._context.term()
            raise

    def pending(self, identity: bytes) -> int:
        """Messages that wait for this peer."""
        return len(self._waiting.get(identity, ()))

    def send(self, identity: bytes, message: Wire, *, is_terminal: bool = False) -> bool:
        """Send or buffer; False when the peer is gone or its buffer full (the callback says which).

        A terminal is taken whatever the buffer holds: there is at most one per request of the peer. Raises WireError
        for a message over the frame limit and LinkClosed after close().
        """
        if self._socket.closed:
            raise LinkClosed(f"{self.address} is closed")
        frame = encode(message)
        waiting = self._waiting.get(identity)
        if not waiting:
            outcome = self._try_send(identity, frame)
            if outcome is not None:
                return outcome
            waiting = self._waiting.setdefault(identity, deque())
            self._arm()
        if len(waiting) >= self._limit and not is_terminal:
            self._mark_slow(identity)
            return False
        waiting.append(frame)
        return True

    def forget(self, identity: bytes) -> None:
        """Drop what waits for a peer."""
        self._waiting.pop(identity, None)
        self._slow.discard(identity)

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._reader.close()
        self._socket.close(0)
        self._path.unlink(missing_ok=True)
        self._context.term()

    def _mark_slow(self, identity: bytes) -> None:
        self.stats.rejected += 1
        if identity not in self._slow:
            self._slow.add(identity)
            self._on_slow(identity)

    def _try_send(self, identity: bytes, frame: bytes) -> bool | None:
        """True: taken; None: the pipe is full; False: the peer is gone (on_gone was called)."""
        self._reader.touched()
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.forget(identity)
            self._on_gone(identity)
            return False
        return True

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = self._loop.call_later(RETRY_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        for identity in list(self._waiting):
            self._flush_peer(identity)
        self._arm()

    def _flush_peer(self, identity: bytes) -> None:
        waiting = self._waiting.get(identity)
        while waiting:
            if not self._try_send(identity, waiting[0]):
                return
            waiting.popleft()
        self.forget(identity)

    def _receive(self, parts: list[bytes]) -> None:
        try:
            if len(parts) != 2:
                raise WireError(f"message of {len(parts)} parts, expected an identity and a frame")
            message = self._decode(parts[1])
        except WireError:
            self.stats.rejected += 1
            return
        self.stats.messages += 1
        self._on_message(parts[0], message)
