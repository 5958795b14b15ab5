"""Links between processes: PUSH -> PULL over ipc, one direction a socket, the receiver binds.

Owns the sockets of one process and their context. Each option below answers a way in which ZeroMQ loses messages or
hangs: IMMEDIATE before connect (else a PUSH queues for a peer that isn't there), chosen high-water marks and
non-blocking sends (EAGAIN reaches the caller), LINGER 0 (else term() waits for ever), MAXMSGSIZE, and paths that are
never bound twice (a second bind on a live ipc path succeeds and steals its connections). Sockets are synchronous:
a descriptor plus drain-to-EAGAIN costs a third of zmq.asyncio. Must not know what the messages mean.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import zmq

from epicycle.transport.codec import MAX_FRAME_BYTES, Decoder, encode
from epicycle.transport.errors import AddressError, LinkClosed, LinkFull, WireError
from epicycle.transport.link import DRAIN_LIMIT, LinkStats, Receiver, Sender, path_name
from epicycle.transport.wire.base import Wire

SCHEME = "ipc://"
PATH_LIMIT_BYTES = 107  # sun_path less its NUL
HIGH_WATER_MESSAGES = 1024
RECONNECT_MS = 20
RECONNECT_MAX_MS = 1000


def ipc_address(path: Path) -> str:
    """The address of a socket file. Raises AddressError when the kernel would refuse the path."""
    length = len(os.fsencode(path))
    if length > PATH_LIMIT_BYTES:
        raise AddressError(f"socket path {path} has {length} bytes, the limit is {PATH_LIMIT_BYTES}; shorten --run-dir")
    return f"{SCHEME}{path}"


def ipc_path(address: str) -> Path:
    """The socket file of an address. Raises AddressError for one that isn't ipc or is too long."""
    if not address.startswith(SCHEME):
        raise AddressError(f"{address!r} is not an ipc address ({SCHEME}PATH)")
    path = Path(address.removeprefix(SCHEME))
    ipc_address(path)
    return path


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, high_water: int) -> zmq.Socket[bytes]:
    """A socket with the options every one of ours carries, to be bound or connected afterwards."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def bind_fresh(socket: zmq.Socket[bytes], path: Path) -> str:
    """Bind to a path that nobody has bound before; the address. Raises AddressError."""
    address = ipc_address(path)
    if path.exists():
        raise AddressError(f"{path} has been bound before; a new incarnation needs a new epoch")
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise AddressError(f"can't bind {path}: {error}") from error
    return address


class ZmqReceiver:
    """Binding end: a PULL socket."""

    def __init__(self, socket: zmq.Socket[bytes], path: Path, link: str, union: object) -> None:
        self.link = link
        self.address = bind_fresh(socket, path)
        self._path = path
        self._socket = socket
        self._decode: Decoder[object] = Decoder(union)
        self._stats = LinkStats()
        self._fd = int(socket.getsockopt(zmq.FD))

    @property
    def stats(self) -> LinkStats:
        return self._stats

    def fileno(self) -> int:
        return self._fd

    def drain(self, limit: int = DRAIN_LIMIT) -> list[object]:
        messages: list[object] = []
        if self._socket.closed:
            raise LinkClosed(f"{self.address} is closed")
        while len(messages) < limit:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(self._decode(_only(frames)))
            except WireError:
                self._stats.rejected += 1
        self._stats.messages += len(messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(math.ceil(max(0.0, timeout_s) * 1000)))

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(0)
            self._path.unlink(missing_ok=True)


def _only(frames: list[bytes]) -> bytes:
    if len(frames) != 1:
        raise WireError(f"message of {len(frames)} parts, ours have one")
    return frames[0]


class ZmqSender:
    """Connecting end: a PUSH socket. Right after connect it has no peer yet, so the first sends may raise LinkFull."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.address = address
        self._socket = socket
        self._stats = LinkStats()
        socket.connect(address)

    @property
    def stats(self) -> LinkStats:
        return self._stats

    def send(self, message: Wire) -> None:
        if self._socket.closed:
            raise LinkClosed(f"the link to {self.address} is closed")
        frame = encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._stats.rejected += 1
            raise LinkFull(f"{self.address} is slow or absent") from None
        self._stats.messages += 1

    def close(self) -> None:
        self._socket.close(0)


class ZmqFabric:
    """The links of one process. bind, connect and close are for one thread; an end may be handed to another once."""

    def __init__(self, run_dir: Path, high_water: int = HIGH_WATER_MESSAGES) -> None:
        self._run_dir = run_dir
        self._high_water = high_water
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends: list[ZmqReceiver | ZmqSender] = []
        self._bound: set[Path] = set()

    def bind(self, owner: str, epoch: int, link: str, union: object) -> Receiver[object]:
        path = self._run_dir / path_name(owner, epoch, link)
        if path in self._bound:  # its file is gone once closed, the rule is not
            raise AddressError(f"{path} has been bound before; a new incarnation needs a new epoch")
        socket = open_socket(self._context, zmq.PULL, self._high_water)
        try:
            receiver = ZmqReceiver(socket, path, link, union)
        except AddressError:
            socket.close(0)
            raise
        self._bound.add(path)
        self._ends.append(receiver)
        return receiver

    def connect(self, address: str) -> Sender:
        ipc_path(address)
        sender = ZmqSender(open_socket(self._context, zmq.PUSH, self._high_water), address)
        self._ends.append(sender)
        return sender

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._ends.clear()
        self._context.term()
