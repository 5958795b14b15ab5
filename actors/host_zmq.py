"""The uplink of a child process: one thread that owns the DEALER to the supervisor.

It says Hello, beats, sends what the host queued and hands over what arrives. It runs beside the actor, so it can still
tell the supervisor that the actor's loop has stopped turning; a process that is stopped or gone simply falls silent.
When the supervisor is gone it ends the process.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from typing import NoReturn, Protocol

import structlog
import zmq

from epicycle.actors.host import BEAT_INTERVAL_S
from epicycle.transport.codec import Decoder, encode
from epicycle.transport.doorbell import Doorbell
from epicycle.transport.errors import WireError
from epicycle.transport.wire.base import WIRE_VERSION
from epicycle.transport.wire.control import Beat, Fatal, FromSupervisor, Hello, ToSupervisor
from epicycle.transport.zmq_link import HIGH_WATER_MESSAGES, open_socket

SUPERVISOR_SOCKET = "sup"  # in the run directory
EXIT_FATAL = 70
EXIT_ORPHANED = 71
FAREWELL_MS = 1000  # how long last words may take
RETRY_MS = 20  # between attempts to send while the supervisor is slow

_log = structlog.get_logger()


class Carried(Protocol):
    """What the thread asks of its host."""

    name: str
    epoch: int

    def beat(self) -> Beat: ...

    def deliver(self, message: FromSupervisor) -> None: ...


class ZmqUplink:
    """`address` is the supervisor's ROUTER; `parent_pid` the process whose end ends this one."""

    def __init__(self, address: str, parent_pid: int) -> None:
        self._address = address
        self._parent_pid = parent_pid
        self._nonce = os.urandom(4).hex()
        self._outbox: deque[bytes] = deque()
        self._doorbell = Doorbell()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, host: Carried) -> None:
        self._thread = threading.Thread(target=self._run, args=(host,), name="uplink", daemon=True)
        self._thread.start()

    def send(self, message: ToSupervisor) -> None:
        self._outbox.append(encode(message))
        self._doorbell.ring()

    def close(self) -> None:
        """Flush and end the thread; waits at most FAREWELL_MS twice."""
        self._is_closing.set()
        self._doorbell.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * FAREWELL_MS / 1000)

    def leave(self, fatal: Fatal) -> NoReturn:
        self.send(fatal)
        self.close()
        os._exit(EXIT_FATAL)

    def _run(self, host: Carried) -> None:
        context = zmq.Context()
        socket = self._connect(context, host)
        decode: Decoder[FromSupervisor] = Decoder(FromSupervisor)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._doorbell.fileno(), zmq.POLLIN)
        self._outbox.appendleft(encode(Hello(host.name, os.getpid(), self._nonce, host.epoch, WIRE_VERSION)))
        next_beat_s = time.monotonic()
        while not self._is_closing.is_set():
            is_clear = self._flush(socket)
            if is_clear and time.monotonic() >= next_beat_s:
                self._outbox.append(encode(host.beat()))
                next_beat_s = time.monotonic() + BEAT_INTERVAL_S
                is_clear = self._flush(socket)
            pause_ms = max(0.0, next_beat_s - time.monotonic()) * 1000
            poller.poll(math.ceil(pause_ms if is_clear else min(pause_ms, RETRY_MS)))
            self._doorbell.silence()
            self._receive(socket, decode, host)
            self._leave_if_orphaned()
        deadline_s = time.monotonic() + FAREWELL_MS / 1000
        while not self._flush(socket) and time.monotonic() < deadline_s:
            poller.poll(RETRY_MS)
        context.destroy(linger=FAREWELL_MS)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], host: Carried) -> zmq.Socket[bytes]:
        socket = open_socket(context, zmq.DEALER, HIGH_WATER_MESSAGES)
        socket.setsockopt(zmq.IDENTITY, f"{host.name}.e{host.epoch}.{os.getpid()}.{self._nonce}".encode())
        socket.connect(self._address)
        return socket

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send the outbox in order; False when the supervisor takes no more for now."""
        while self._outbox:
            try:
                socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._outbox.popleft()
        return True

    def _receive(self, socket: zmq.Socket[bytes], decode: Decoder[FromSupervisor], host: Carried) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                host.deliver(decode(frame))
            except WireError as error:
                _log.warning("frame_dropped", actor=host.name, error=str(error))

    def _leave_if_orphaned(self) -> None:
        """PDEATHSIG is the fast way; this one also works where the signal was lost."""
        if os.getppid() != self._parent_pid:
            os._exit(EXIT_ORPHANED)
