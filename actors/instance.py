"""One server from its sockets to its exit code: what the process of `epicycle serve` does after reading its flags.

Binds the HTTP socket before anything else, makes the run directory, and runs a supervisor over child processes or, for
debugging, over actors inside this process. Knows the children's module names; imports none of them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog
import uvloop

import epicycle
from epicycle.actors.errors import ListenError
from epicycle.actors.host_zmq import SUPERVISOR_SOCKET
from epicycle.actors.peer_names import KIND_OF_ROLE
from epicycle.actors.peers import Peers
from epicycle.actors.proc import ChildSpec, Processes
from epicycle.actors.single import LocalChildren
from epicycle.actors.supervisor import Launcher, Supervisor
from epicycle.transport.config import Config, RecordConfig
from epicycle.transport.executors import executor_specs
from epicycle.transport.router import Router
from epicycle.transport.rundir import Instance, RunDir
from epicycle.transport.wire.control import ToSupervisor

BACKLOG = 1024
MODULES = {
    "executor": "epicycle.actors.executor",
    "control": "epicycle.actors.control",
    "gateway": "epicycle.actors.gateway.__main__",  # like the others it both runs and has make_actor
}

_log = structlog.get_logger()


@dataclass(frozen=True)
class Outcome:
    """How a server ended: the process's exit code, and why it gave up (empty: it was asked to stop)."""

    exit_code: int
    cause: str


def serve(config: Config, on_up: Callable[[Instance], None], modules: dict[str, str] = MODULES) -> Outcome:
    """Run a server until it is stopped. `on_up` is called once, when it can answer. `modules` has one per kind.

    Raises ListenError and RunDirError before any child has started. Main thread only.
    """
    listener = listen(config.server.host, config.server.port)
    with listener:
        port = listener.getsockname()[1]
        run_dir = RunDir.create(port, config.run_dir)
        try:
            server = msgspec.structs.replace(config.server, port=port)
            config = msgspec.structs.replace(
                config, server=server, run_dir=str(run_dir.path), record=_settled(config.record)
            )
            run_dir.write_config(config)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Instance(config, listener, run_dir, on_up, modules).run())
        finally:
            run_dir.close()


def _settled(record: RecordConfig) -> RecordConfig:
    """One path and one key for all gateways and all their incarnations."""
    if not record.file:
        return record
    salt = record.salt or secrets.token_hex(16)
    return msgspec.structs.replace(record, file=os.path.abspath(record.file), salt=salt)


def listen(host: str, port: int) -> socket.socket:
    """The listening HTTP socket. Listening at once makes a second server fail here and not in a child. ListenError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ListenError(f"server.host is {host!r}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(f"can't listen on {host} port {port} (--host, --port): {error.strerror}") from error
    listener.setblocking(False)
    return listener


class _Instance:
    """The parts of a running server, put together on the loop."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        run_dir: RunDir,
        on_up: Callable[[Instance], None],
        modules: dict[str, str],
    ) -> None:
        self._config = config
        self._listener = listener
        self._run_dir = run_dir
        self._on_up = on_up
        self._specs = _specs(config, listener, modules)

    async def run(self) -> Outcome:
        kinds = {spec.name: spec.kind for spec in self._specs}
        settings = self._config.supervisor
        if self._config.single_process:
            settings = msgspec.structs.replace(settings, restart_budget=0)
        supervisor = Supervisor(settings, kinds, self._announce, self._publish)
        self._peers = supervisor.peers
        router = Router(
            self._run_dir.path / SUPERVISOR_SOCKET,
            ToSupervisor,
            on_message=lambda identity, message: supervisor.hear(message, partial(router.send, identity)),
            on_slow=lambda identity: _log.warning("peer_slow", actor="supervisor", identity=identity.hex()),
            on_gone=lambda identity: _log.debug("peer_gone", actor="supervisor", identity=identity.hex()),
        )
        self._router_address = router.address
        self._publish(supervisor.peers)
        _obey_signals(supervisor)
        try:
            return Outcome(await supervisor.run(self._launcher(supervisor)), supervisor.cause)
        finally:
            router.close()

    def _launcher(self, supervisor: Supervisor) -> Launcher:
        if self._config.single_process:
            hear, on_exit, fail = supervisor.hear, supervisor.on_exit, supervisor.fail
            return LocalChildren(self._specs, self._config, self._listener, hear, on_exit, fail)
        return Processes(self._specs, self._run_dir.path, supervisor.on_exit)

    def _announce(self) -> None:
        self._on_up(self._describe(self._peers))

    def _publish(self, peers: Peers) -> None:
        self._run_dir.publish(self._describe(peers))

    def _describe(self, peers: Peers) -> Instance:
        """What clients may connect to now."""
        clients = {
            f"{peer.name}.client": endpoint.address
            for peer in peers
            for endpoint in peer.endpoints
            if peer.is_at_work and endpoint.link == "client"
        }
        return Instance(
            version=epicycle.__version__,
            host=self._config.server.host,
            port=self._config.server.port,
            run_dir=str(self._run_dir.path),
            endpoints={"supervisor": self._router_address, **clients},
            pids={"supervisor": os.getpid(), **{peer.name: peer.pid for peer in peers if peer.pid}},
            executors={spec.name: spec.role for spec in executor_specs(self._config)},
        )


def _specs(config: Config, listener: socket.socket, modules: dict[str, str]) -> list[ChildSpec]:
    """The children of a server, the slowest to start first."""
    gateways = [
        ChildSpec(f"gw{number}", "gateway", modules["gateway"], listener.fileno())
        for number in range(config.server.gateways)
    ]
    executors = [ChildSpec(spec.name, KIND_OF_ROLE[spec.role], modules["executor"]) for spec in executor_specs(config)]
    return [
        *executors,
        ChildSpec("control", "control", modules["control"]),
        *gateways,
    ]


def _obey_signals(supervisor: Supervisor) -> None:
    """SIGTERM and SIGINT drain; a second SIGTERM is harmless, a second SIGINT cuts the drain short."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop)
    loop.add_signal_handler(signal.SIGINT, supervisor.stop, True)
