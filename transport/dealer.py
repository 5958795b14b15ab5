"""The one-to-many end of two-way traffic: a DEALER on an asyncio loop that knows when its peer went away.

Owns the socket, its monitor and their context. ZeroMQ reconnects without a word and forgets what was asked;
the monitor's disconnect event is how a client learns that its requests are lost. Must not know what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from epicycle.transport.codec import Decoder, encode
from epicycle.transport.edge_reader import EdgeReader
from epicycle.transport.errors import LinkClosed, LinkFull, WireError
from epicycle.transport.link import LinkStats
from epicycle.transport.wire.base import Wire
from epicycle.transport.zmq_link import HIGH_WATER_MESSAGES, ipc_path, open_socket


class Dealer:
    """A Sender that also receives; every method and callback on the loop's thread.

    on_message(message): one decoded message. on_lost(): the connection broke, once, after what had arrived before.
    """

    def __init__(
        self, address: str, union: object, *, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> None:
        """Connects on the running loop. Raises AddressError for an address that isn't ipc."""
        ipc_path(address)
        self.address = address
        self._stats = LinkStats()
        self._on_message = on_message
        self._on_lost = on_lost
        self._decode: Decoder[Any] = Decoder(union)
        self._settled = asyncio.Event()
        self._is_lost = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, HIGH_WATER_MESSAGES)
        loop = asyncio.get_running_loop()
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._monitor_reader = EdgeReader(loop, self._monitor, self._on_event)
        self._socket.connect(address)
        self._reader = EdgeReader(loop, self._socket, self._receive)

    @property
    def stats(self) -> LinkStats:
        """messages and rejected of the receiving side."""
        return self._stats

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether the peer answers the handshake within the time; False at once when it hangs up."""
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._is_lost

    def send(self, message: Wire) -> None:
        """As Sender.send."""
        if self._socket.closed:
            raise LinkClosed(f"the connection to {self.address} is closed")
        frame = encode(message)
        self._reader.touched()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise LinkFull(f"{self.address} is slow or absent") from None

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        self._reader.close()
        self._monitor_reader.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def _receive(self, parts: list[bytes]) -> None:
        try:
            if len(parts) != 1:
                raise WireError(f"message of {len(parts)} parts, ours have one")
            message = self._decode(parts[0])
        except WireError:
            self._stats.rejected += 1
            return
        self._stats.messages += 1
        self._on_message(message)

    def _on_event(self, parts: list[bytes]) -> None:
        match parse_monitor_message(parts)["event"]:
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self._settled.set()
            case zmq.Event.DISCONNECTED:
                self._reader.drain()
                self._monitor_reader.close()
                self._is_lost = True
                self._settled.set()
                self._on_lost()
            case other:
                raise AssertionError(other)
