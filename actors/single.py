"""All actors inside one process, for debugging: the same classes over in-memory links.

Control and the gateways share the supervisor's loop, the executor has a thread. Every message still passes the codec.
An actor that ends takes the server down: there is no telling what it leaves behind in a shared process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import structlog

from epicycle.actors.errors import ActorLeft
from epicycle.actors.host import BEAT_INTERVAL_S, AsyncHost, HostBase, ThreadHost, escaped_error
from epicycle.actors.peer_names import EXECUTOR_KINDS
from epicycle.actors.ports import Actor, SyncActor
from epicycle.actors.proc import ChildSpec
from epicycle.transport.config import Config
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.base import WIRE_VERSION
from epicycle.transport.wire.control import Fatal, FromSupervisor, Hello, ToSupervisor

_log = structlog.get_logger()

Hear = Callable[[ToSupervisor, Callable[[FromSupervisor], object]], None]


class LocalUplink:
    """An actor's way to a supervisor on another corner of the process; sends from any thread, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Hear) -> None:
        self._loop = loop
        self._hear = hear
        self._deliver: Callable[[FromSupervisor], object] = lambda _: None

    def start(self, host: AsyncHost | ThreadHost) -> None:
        self._deliver = host.deliver
        self.send(Hello(host.name, os.getpid(), os.urandom(4).hex(), host.epoch, WIRE_VERSION))

    def send(self, message: ToSupervisor) -> None:
        with contextlib.suppress(RuntimeError):  # a thread left behind may outlive the loop
            self._loop.call_soon_threadsafe(self._hear, message, self._deliver)

    def leave(self, fatal: Fatal) -> NoReturn:
        self.send(fatal)
        raise ActorLeft(f"{fatal.code}: {fatal.message}")


class LocalChildren:
    """The launcher of a single process. A name is alive until its run() has returned or failed."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        config: Config,
        listener: socket.socket,
        hear: Hear,
        on_exit: Callable[[str, str], None],
        fail: Callable[[str], None],
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._config = config
        self._listener = listener
        self._hear = hear
        self._on_exit = on_exit
        self._fabric = LocalFabric()
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fail = fail
        self._loop.set_exception_handler(self._on_exception)

    @property
    def alive(self) -> list[str]:
        return list(self._tasks)

    def start(self, name: str, epoch: int) -> int:
        """Start an actor; the pid is this process's own."""
        work = self._run_thread(name, epoch) if self._specs[name].kind in EXECUTOR_KINDS else self._run(name, epoch)
        task = self._loop.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._ended(name))
        return os.getpid()

    def kill(self, names: Sequence[str], signum: signal.Signals) -> None:
        """Cancel; a thread that doesn't heed Stop is left behind (it is a daemon)."""
        for name in names:
            if name in self._tasks:
                self._tasks[name].cancel()

    async def _run(self, name: str, epoch: int) -> None:
        uplink = LocalUplink(self._loop, self._hear)
        host = AsyncHost(name, epoch, self._config, self._fabric, uplink)
        uplink.start(host)
        module = importlib.import_module(self._specs[name].module)
        is_gateway = self._specs[name].http_fd >= 0
        actor: Actor = module.make_actor(host, self._listener.dup()) if is_gateway else module.make_actor(host)
        host.attach(actor)
        beats = self._loop.create_task(_beat(host, uplink))
        try:
            await actor.run()
        finally:
            beats.cancel()
            host.close()

    async def _run_thread(self, name: str, epoch: int) -> None:
        """The executor, torch's import included, beside the loop."""
        uplink = LocalUplink(self._loop, self._hear)
        host = ThreadHost(name, epoch, self._config, self._fabric, uplink)
        uplink.start(host)
        over: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(target=self._thread_main, args=(host, over), name=name, daemon=True)
        thread.start()
        beats = self._loop.create_task(_beat(host, uplink))
        try:
            await over
        finally:
            beats.cancel()

    def _thread_main(self, host: ThreadHost, over: asyncio.Future[None]) -> None:
        try:
            actor: SyncActor = importlib.import_module(self._specs[host.name].module).make_actor(host)
            host.attach(actor)
            actor.run()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, over, error)
        else:
            self._loop.call_soon_threadsafe(_settle, over, None)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Which actor's callback it was can't be told, and needn't: the server stops."""
        loop.default_exception_handler(context)
        error = escaped_error(context, is_strict=False)
        if error is not None:
            self._fail(f"an actor's callback failed: {type(error).__name__}: {error}")

    def _ended(self, name: str) -> None:
        task = self._tasks.pop(name)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ActorLeft):
            _log.error("crashed", actor=name, exc_info=error)
        self._on_exit(name, _ending(task.cancelled(), error))


def _ending(was_cancelled: bool, error: BaseException | None) -> str:
    """How an actor ended, for people."""
    if error is not None:
        return f"{type(error).__name__}: {error}"
    return "was cancelled" if was_cancelled else "returned"


def _settle(over: asyncio.Future[None], error: BaseException | None) -> None:
    if over.done():
        return
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)


async def _beat(host: HostBase, uplink: LocalUplink) -> None:
    while True:
        uplink.send(host.beat())
        await asyncio.sleep(BEAT_INTERVAL_S)
