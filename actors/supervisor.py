"""The supervisor: starts the children, watches them, restarts them, drains and stops them.

Owns the life of the instance (starting, running, draining, stopping, stopped) and its exit code. Children speak to it
through `hear`, their ends arrive at `on_exit`; whether they are processes or corners of this one is the launcher's
business. It knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import structlog

from epicycle.actors.health_view import Pinged, view
from epicycle.actors.peers import Peers
from epicycle.actors.restarts import RestartBudget
from epicycle.transport.config import SupervisorConfig
from epicycle.transport.wire.base import WIRE_VERSION
from epicycle.transport.wire.control import (
    Beat,
    Drain,
    Drained,
    Fatal,
    FromSupervisor,
    HealthQuery,
    HealthReply,
    Hello,
    Ping,
    Pong,
    Ready,
    Stop,
    ToSupervisor,
)

TICK_S = 0.1
SLEPT_S = 0.5  # a tick later than this means that the supervisor itself did not run
STOP_GRACE_S = 1.0  # between Stop and SIGTERM
FAILED_DRAIN_S = 1.0  # what a failing instance leaves its gateways to answer with
PING_DEADLINE_S = 1.0
LAST_WORDS_S = 1.0  # how much later than a child's end its Fatal may be read: they come by different ways
DRAINING_KINDS = ("gateway", "control")

_log = structlog.get_logger()

Reply = Callable[[FromSupervisor], object]


class Launcher(Protocol):
    """Makes children and ends them; reports each end through `Supervisor.on_exit`."""

    @property
    def alive(self) -> list[str]: ...

    def start(self, name: str, epoch: int) -> int:
        """The pid of the new child. Raises OSError when there is no starting it."""

    def kill(self, names: Sequence[str], signum: signal.Signals) -> None: ...


class Supervisor:
    """One instance. `kinds` maps child names to their kinds (peers.NEEDS), in start order. `on_up` is called once,
    when every child is Ready for the first time; `on_change` whenever a child came up or went away. All methods run on
    one asyncio loop.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        kinds: dict[str, str],
        on_up: Callable[[], None],
        on_change: Callable[[Peers], None],
    ) -> None:
        self.state = "starting"
        self.exit_code = 0
        self.cause = ""  # why the instance stops by itself; empty when it was asked to
        self.peers = Peers(kinds, self._send)
        self._config = config
        self._on_up = on_up
        self._on_change = on_change
        self._launcher: Launcher | None = None
        self._routes: dict[str, Reply] = {}
        self._budgets = {name: RestartBudget(config.restart_budget, config.restart_window_s) for name in kinds}
        self._stop_asked = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_hurried = False
        self._hung: set[str] = set()
        self._pings = itertools.count(1)
        self._deep_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, launcher: Launcher) -> int:
        """From the first start to the last reaping; the exit code for the process."""
        self._launcher = launcher
        for name in self.peers.by_name:
            self._start(name)
        ticker = asyncio.create_task(self._tick_for_ever())
        await self._stop_asked.wait()
        await self._drain()
        await self._stop_children()
        ticker.cancel()
        self.state = "stopped"
        _log.info("stopped", actor="supervisor", exit_code=self.exit_code)
        return self.exit_code

    def stop(self, is_hurried: bool = False) -> None:
        """Drain and leave. `is_hurried` cuts a drain that is under way; otherwise asking again changes nothing."""
        self._is_hurried |= is_hurried and self._stop_asked.is_set()
        self._stop_asked.set()
        self._changed.set()

    def hear(self, message: ToSupervisor, reply: Reply) -> None:
        """A child, the CLI or a client has spoken; `reply` is the way back."""
        now_s = time.monotonic()
        match message:
            case Hello():
                self._meet(message, reply, now_s)
            case Beat() | Drained() | Fatal():
                self.peers.hear(message, now_s)
            case Ready():
                self.peers.hear(message, now_s)
                misfit = self.peers.misfit(message.name)
                if misfit:
                    self.fail(f"split_mismatch: {misfit}")
                self._on_change(self.peers)
                self._note_up()
            case Pong():
                self.peers.hear_pong(message, now_s)
            case HealthQuery(ref=ref, is_deep=False):
                reply(self._health(ref))
            case HealthQuery(ref=ref):
                self._spawn(self._answer_deeply(ref, reply))
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")
        self._changed.set()

    def on_exit(self, name: str, reason: str, has_last_words: bool = False) -> None:
        """A child has ended. With `has_last_words` it has sent a Fatal, which says better than `reason` why."""
        if has_last_words and self.state != "stopping":
            self._spawn(self._hear_out(name, reason))
        else:
            self._bury(name, reason)

    async def _hear_out(self, name: str, reason: str) -> None:
        await self._until(lambda: self.peers.by_name[name].state == "failed", LAST_WORDS_S)
        self._bury(name, reason)

    def _bury(self, name: str, reason: str) -> None:
        """Tell the partners of a child that has ended, then restart it, or give up."""
        now_s = time.monotonic()
        peer = self.peers.by_name[name]
        is_expected = self.state == "stopping"
        self.peers.bury(name, reason, now_s, is_told=not is_expected)
        self._routes.pop(name, None)
        self._hung.discard(name)
        self._changed.set()
        log = _log.info if is_expected else _log.error
        log("exited", actor=name, epoch=peer.epoch, reason=reason)
        if is_expected:
            return
        self._on_change(self.peers)
        if self._stop_asked.is_set():
            self.exit_code = 1
        elif self.state == "starting":
            self.fail(f"{name} failed to start: {peer.last_error}")
        elif not self._budgets[name].spend(now_s):
            self.fail(
                f"{name} ended ({peer.last_error}) and the restart budget is spent: supervisor.restart_budget = "
                f"{self._config.restart_budget} in restart_window_s = {self._config.restart_window_s:g}"
            )
        else:
            peer.restarts += 1
            self._start(name)

    def fail(self, cause: str) -> None:
        """Stop by itself, with a non-zero exit code; the first cause counts."""
        if not self.cause:
            self.cause = cause
            _log.error("giving_up", actor="supervisor", cause=cause)
        self.exit_code = 1
        self.stop()

    def _start(self, name: str) -> None:
        assert self._launcher is not None, "run() comes first"
        peer = self.peers.by_name[name]
        epoch = self.peers.start(name, time.monotonic())
        try:
            peer.pid = self._launcher.start(name, epoch)
        except OSError as error:
            self.fail(f"{name} can't be started: {error}")
            return
        _log.info("starting", actor=name, epoch=epoch, pid=peer.pid)

    def _meet(self, hello: Hello, reply: Reply, now_s: float) -> None:
        """Only the child that was started may take the name; anyone else is asked to leave."""
        peer = self.peers.by_name.get(hello.name)
        if peer is None or (hello.epoch, hello.pid) != (peer.epoch, peer.pid) or hello.wire_version != WIRE_VERSION:
            known = f"epoch {peer.epoch}, pid {peer.pid}" if peer else "nobody"
            reply(Stop(f"{hello.name} epoch {hello.epoch} pid {hello.pid} wire {hello.wire_version}: expected {known}"))
            return
        self._routes[hello.name] = reply
        self.peers.hear(hello, now_s)

    def _send(self, name: str, message: FromSupervisor) -> None:
        route = self._routes.get(name)
        if route is not None:
            route(message)

    def _note_up(self) -> None:
        if self.state == "starting" and self.peers.are_all_ready and not self._stop_asked.is_set():
            self.state = "running"
            self._on_up()

    async def _tick_for_ever(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            if now_s - before_s > SLEPT_S:
                self.peers.forgive(now_s - before_s - TICK_S)
            before_s = now_s
            self._watch(now_s)

    def _watch(self, now_s: float) -> None:
        """Hangs are told, and ended where the configuration says so; a start-up that takes too long always is."""
        for peer in self.peers:
            hang = peer.hang(self._config, now_s)
            if bool(hang) != (peer.name in self._hung):
                (self._hung.add if hang else self._hung.discard)(peer.name)
                _log.warning("stale" if hang else "recovered", actor=peer.name, epoch=peer.epoch, cause=hang)
            limit_s = self._config.kill_hung_after_s
            if limit_s and peer.hung_for_s(self._config, now_s) > limit_s:
                self._end(peer.name, f"killed: {hang} (supervisor.kill_hung_after_s = {limit_s:g})", now_s)
            late_s = now_s - peer.started_s - self._config.startup_timeout_s
            if peer.pid and not peer.is_introduced and late_s > 0:
                limit_s = self._config.startup_timeout_s
                self._end(peer.name, f"not Ready within supervisor.startup_timeout_s = {limit_s:g}", now_s)

    def _end(self, name: str, reason: str, now_s: float) -> None:
        assert self._launcher is not None, "run() comes first"
        peer = self.peers.by_name[name]
        if peer.state != "failed":
            peer.state = "failed"
            peer.note_error(reason, now_s)
            self._launcher.kill([name], signal.SIGKILL)

    async def _drain(self) -> None:
        """Let running requests finish, as long as drain_s allows; a failing instance gets a moment only."""
        was_up, self.state = self.state != "starting", "draining"
        if not was_up:
            return
        limit_s = FAILED_DRAIN_S if self.exit_code else self._config.drain_s
        _log.info("draining", actor="supervisor", limit_s=limit_s)
        for peer in self.peers:
            if peer.kind in DRAINING_KINDS:
                self._send(peer.name, Drain(int(limit_s * 1000)))
        is_over = await self._until(lambda: self._is_hurried or self.peers.drained(DRAINING_KINDS), limit_s + 1.0)
        if not is_over:
            _log.warning("drain_deadline", actor="supervisor", limit_s=limit_s)

    async def _stop_children(self) -> None:
        """Stop, then SIGTERM, then SIGKILL to whoever is left; returns when all are reaped."""
        assert self._launcher is not None, "run() comes first"
        launcher = self._launcher
        self.state = "stopping"
        for name in launcher.alive:
            self._send(name, Stop(self.cause or "the instance stops"))
        if await self._until(lambda: not launcher.alive, STOP_GRACE_S):
            return
        launcher.kill(launcher.alive, signal.SIGTERM)
        if await self._until(lambda: not launcher.alive, self._config.stop_grace_s):
            return
        _log.warning("killing", actor="supervisor", children=launcher.alive)
        launcher.kill(launcher.alive, signal.SIGKILL)
        await self._until(lambda: not launcher.alive, self._config.stop_grace_s + 1.0)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something that `hear` or `on_exit` brings about; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    async def _answer_deeply(self, ref: int, reply: Reply) -> None:
        """Ping every actor at work through its own mailbox, one query at a time."""
        async with self._deep_lock:
            pinged = Pinged(next(self._pings), time.monotonic())
            asked = [peer for peer in self.peers if peer.is_at_work]
            for peer in asked:
                self._send(peer.name, Ping(pinged.ref))
            await self._until(lambda: all(peer.pong_ref == pinged.ref for peer in asked), PING_DEADLINE_S)
            reply(self._health(ref, pinged))

    def _health(self, ref: int, pinged: Pinged | None = None) -> HealthReply:
        state = "stopped" if self.state == "stopping" else self.state
        return view(self.peers, self._config, state, time.monotonic(), ref, pinged)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
