"""What an actor meets of its process: start-up words, liveness, peers, drain.

Two hosts, by how their actor runs: `AsyncHost` on an asyncio loop, `ThreadHost` for the synchronous executor. Neither
knows how words reach the supervisor: that is the uplink's business (`host_zmq.py` in a process of its own,
`single.py` inside one process). Owns the actor's declared state and the beat; knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

import structlog

from epicycle.actors.ports import BeatFacts, Hosted
from epicycle.transport.config import Config
from epicycle.transport.doorbell import Doorbell, Pollable, wait_readable
from epicycle.transport.link import Fabric
from epicycle.transport.wire.control import (
    Beat,
    Capabilities,
    Drain,
    Drained,
    Endpoint,
    Fatal,
    FromSupervisor,
    HealthQuery,
    HealthReply,
    PeerDown,
    PeerUp,
    Ping,
    Pong,
    Ready,
    Stop,
    ToSupervisor,
)

BEAT_INTERVAL_S = 0.5
TOUCH_INTERVAL_S = 0.25
HEALTH_DEADLINE_S = 2.0
LOOP_LAG = "loop_lag_seconds"  # the beat counter that says how long ago the actor's own loop last turned

_log = structlog.get_logger()


def escaped_error(context: dict[str, Any], is_strict: bool) -> Exception | None:
    """From the context of a loop's exception handler: an error that left an actor's state half changed, or None.

    That is what escapes a callback, and in strict mode a failed task too. Lost connections are everyday events.
    """
    error = context.get("exception")
    is_ours = "handle" in context or (is_strict and "future" in context)
    return error if is_ours and isinstance(error, Exception) and not isinstance(error, ConnectionError) else None


class Uplink(Protocol):
    """The way to the supervisor. All methods may be called from any thread."""

    def send(self, message: ToSupervisor) -> None:
        """Queue a message; never waits."""

    def leave(self, fatal: Fatal) -> NoReturn:
        """Deliver `fatal` as well as time allows, then end the process (or unwind the actor in a shared one)."""


class HostBase:
    """The half that both hosts share. `attach` comes before any message is delivered."""

    def __init__(self, name: str, epoch: int, config: Config, fabric: Fabric, uplink: Uplink) -> None:
        self.name = name
        self.epoch = epoch
        self.config = config
        self.fabric = fabric
        self.state = "loading"
        self.is_stopping = False
        self._uplink = uplink
        self._actor: Hosted | None = None
        self._asked: dict[int, Future[HealthReply]] = {}
        self._refs = itertools.count(1)
        self._touched_s = time.monotonic()
        self._facts = BeatFacts()

    def attach(self, actor: Hosted) -> None:
        self._actor = actor

    def ready(self, endpoints: list[Endpoint], capabilities: Capabilities | None = None) -> None:
        """Say that the actor works; from now on it is watched for hangs."""
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: keep the collector from walking it
        self.touch()
        self.state = "ready"
        self._uplink.send(Ready(self.name, self.epoch, endpoints, capabilities))
        _log.info("ready", actor=self.name, epoch=self.epoch)

    def drained(self) -> None:
        self._uplink.send(Drained(self.name, self.epoch))
        _log.info("drained", actor=self.name, epoch=self.epoch)

    def fatal(self, code: str, message: str) -> NoReturn:
        """Report the error and leave with a non-zero exit code."""
        self.state = "failed"
        _log.error("fatal", actor=self.name, epoch=self.epoch, code=code, message=message)
        self._uplink.leave(Fatal(self.name, self.epoch, code, message))

    async def health(self, is_deep: bool = False) -> HealthReply:
        """The supervisor's view. Raises TimeoutError when it doesn't answer."""
        ref = next(self._refs)
        answer: Future[HealthReply] = Future()
        answer.set_running_or_notify_cancel()  # a late reply to a caller that gave up is then harmless
        self._asked[ref] = answer
        self._uplink.send(HealthQuery(ref, is_deep))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), HEALTH_DEADLINE_S)
        finally:
            self._asked.pop(ref, None)

    def touch(self) -> None:
        """The actor's loop has turned."""
        self._touched_s = time.monotonic()

    def beat(self) -> Beat:
        """The truth about the actor right now; called from the uplink's thread."""
        facts = self._read_facts()
        lag_s = 0.0 if self.state == "loading" else time.monotonic() - self._touched_s
        return Beat(
            self.name,
            self.epoch,
            self.state,
            progress=facts.progress,
            pending=facts.pending,
            mailboxes=facts.mailboxes,
            last_error=facts.last_error,
            counters={**facts.counters, LOOP_LAG: round(lag_s, 3)},
        )

    def settle_health(self, reply: HealthReply) -> None:
        answer = self._asked.pop(reply.ref, None)
        if answer is not None:
            answer.set_result(reply)

    def _read_facts(self) -> BeatFacts:
        """The actor's facts; the previous ones when a container changed size under the read."""
        if self._actor is not None:
            try:
                self._facts = self._actor.beat_facts()
            except RuntimeError as error:
                _log.debug("beat_facts_unreadable", actor=self.name, error=str(error))
        return self._facts

    def _handle(self, message: FromSupervisor) -> None:
        """One message from the supervisor, on the actor's own loop or thread."""
        if self._actor is None:  # not yet or no longer at work; a Stop is followed by SIGTERM
            return
        match message:
            case PeerUp():
                self._actor.on_peer_up(message)
            case PeerDown():
                self._actor.on_peer_down(message)
            case Drain():
                self.state = "draining"
                self._actor.on_drain(message)
            case Stop():
                self._actor.on_stop()
            case Ping(ref=ref):
                self._uplink.send(Pong(ref, self.name))
            case HealthReply():
                self.settle_health(message)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")


class AsyncHost(HostBase):
    """Carries an actor on the running asyncio loop. Made on that loop."""

    def __init__(self, name: str, epoch: int, config: Config, fabric: Fabric, uplink: Uplink) -> None:
        super().__init__(name, epoch, config, fabric, uplink)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._keep_touching)

    def deliver(self, message: FromSupervisor) -> None:
        """Hand over a message from the supervisor; any thread."""
        self.is_stopping |= isinstance(message, Stop)
        try:
            self._loop.call_soon_threadsafe(self._handle, message)
        except RuntimeError:  # the loop has closed: the actor is gone and needs no more words
            _log.debug("message_after_close", actor=self.name, message=type(message).__name__)

    def close(self) -> None:
        """The actor has ended; words still on their way to it are dropped."""
        self._timer.cancel()
        self._actor = None

    def _keep_touching(self) -> None:
        self.touch()
        self._timer = self._loop.call_later(TOUCH_INTERVAL_S, self._keep_touching)


class ThreadHost(HostBase):
    """Carries the executor, whose thread calls `wait` and `pump_events` in turn.

    An idle executor must come back from `wait` several times within `supervisor.stale_beat_s`: that is how the
    supervisor tells idle from hung.
    """

    def __init__(self, name: str, epoch: int, config: Config, fabric: Fabric, uplink: Uplink) -> None:
        super().__init__(name, epoch, config, fabric, uplink)
        self._events: deque[FromSupervisor] = deque()
        self._doorbell = Doorbell()

    def deliver(self, message: FromSupervisor) -> None:
        """Hand over a message from the supervisor; any thread."""
        self.is_stopping |= isinstance(message, Stop)
        if isinstance(message, HealthReply):
            self.settle_health(message)
            return
        self._events.append(message)
        self._doorbell.ring()

    def fileno(self) -> int:
        """Readable while events wait for `pump_events`."""
        return self._doorbell.fileno()

    def wait(self, receivers: Sequence[Pollable], timeout_s: float = TOUCH_INTERVAL_S) -> bool:
        """Block until a receiver or the supervisor has something, at most `timeout_s`.

        Receivers are edge-triggered: drain each to [] before waiting. True when something may be there.
        """
        return bool(self._events) or wait_readable((self, *receivers), timeout_s)

    def pump_events(self) -> int:
        """Run what the supervisor sent, on the calling thread (the actor's); returns how many messages that was."""
        self.touch()
        if not self._events:
            return 0
        self._doorbell.silence()
        count = 0
        while self._events:
            self._handle(self._events.popleft())
            count += 1
        return count

    def close(self) -> None:
        self._doorbell.close()
