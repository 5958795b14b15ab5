"""A child process that speaks the host protocol and does no work: what the supervisor's own tests watch.

`python -m tests.fakes.child --name ... ` as the supervisor starts it. Who it knows shows in its beat's counters
(`up.NAME` = epoch). EPICYCLE_FAKE, a JSON object from child name to a behaviour, makes it misbehave:
crash (before Ready), silent (never Ready), stubborn (ignores Drain, Stop and SIGTERM),
clumsy (raises in its answer to Drain).
SIGUSR1 makes it wedge its loop for ever, SIGUSR2 makes it hold work that never moves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading

from epicycle.actors import child
from epicycle.actors.host import AsyncHost, ThreadHost
from epicycle.actors.ports import BeatFacts
from epicycle.transport.wire.control import Drain, Endpoint, PeerDown, PeerUp


class FakeActor:
    """The half that asyncio and synchronous children share."""

    def __init__(self, host: AsyncHost | ThreadHost) -> None:
        self.host = host
        self.behaviour = json.loads(os.environ.get("EPICYCLE_FAKE", "{}")).get(host.name, "")
        self.is_over = False
        self.pending = 0
        self.up: dict[str, float] = {}
        if self.behaviour == "crash":
            raise ValueError("engine.slots is 0, must be at least 1")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._hold_work)
            if self.behaviour == "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _hold_work(self, *_: object) -> None:
        self.pending = 1

    def announce(self) -> None:
        if self.behaviour != "silent":
            self.host.ready([Endpoint("any", f"ipc:///nowhere/{self.host.name}.e{self.host.epoch}")])

    def on_peer_up(self, message: PeerUp) -> None:
        self.up[f"up.{message.name}"] = float(message.epoch)

    def on_peer_down(self, message: PeerDown) -> None:
        assert self.up.pop(f"up.{message.name}") == message.epoch

    def on_drain(self, message: Drain) -> None:
        if self.behaviour == "clumsy":
            raise KeyError("a bug in a callback")
        if self.behaviour != "stubborn":
            self.host.drained()

    def on_stop(self) -> None:
        self.is_over = self.behaviour != "stubborn"

    def beat_facts(self) -> BeatFacts:
        return BeatFacts(pending=self.pending, counters=dict(self.up))


class FakeAsyncActor(FakeActor):
    def __init__(self, host: AsyncHost, http_socket: socket.socket | None = None) -> None:
        super().__init__(host)
        self.http_socket = http_socket
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, threading.Event().wait)
        self.announce()
        await self.stopped.wait()
        if self.http_socket is not None:
            self.http_socket.close()

    def on_stop(self) -> None:
        super().on_stop()
        if self.is_over:
            self.stopped.set()


class FakeSyncActor(FakeActor):
    def run(self) -> None:
        assert isinstance(self.host, ThreadHost)
        self.announce()
        while not self.is_over:
            self.host.pump_events()
            self.host.wait([])


def make_actor(host: AsyncHost | ThreadHost, http_socket: socket.socket | None = None) -> FakeActor:
    return FakeSyncActor(host) if isinstance(host, ThreadHost) else FakeAsyncActor(host, http_socket)


if __name__ == "__main__":
    if any(word.startswith("ex") for word in sys.argv):
        child.run_sync(FakeSyncActor)
    child.run(FakeAsyncActor)
