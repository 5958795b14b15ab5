"""How a child process begins and ends: arguments, death with its parent, logs, the run of its actor.

`run` is the main of an asyncio child, `run_sync` the executor's. The supervisor is the only one whose Stop or SIGTERM
counts: a service manager may signal the whole group, and running requests must survive that until the drain is over.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import structlog
import uvloop

from epicycle.actors import logs
from epicycle.actors.host import AsyncHost, HostBase, ThreadHost, escaped_error
from epicycle.actors.host_zmq import EXIT_FATAL, EXIT_ORPHANED, SUPERVISOR_SOCKET, ZmqUplink
from epicycle.actors.ports import Actor, SyncActor
from epicycle.transport.config import Config
from epicycle.transport.link import Fabric
from epicycle.transport.rundir import read_config
from epicycle.transport.zmq_link import ZmqFabric, ipc_address

PR_SET_PDEATHSIG = 1

_log = structlog.get_logger()


class ChildArgs(msgspec.Struct, frozen=True):
    """What the supervisor tells a child on its command line."""

    name: str
    epoch: int
    run_dir: Path
    parent_pid: int
    http_fd: int = -1


def parse(argv: Sequence[str]) -> ChildArgs:
    parser = argparse.ArgumentParser(description="A child process of epicycle; started by the supervisor.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--http-fd", type=int, default=-1)
    return ChildArgs(**vars(parser.parse_args(argv)))


def run(factory: Callable[..., Actor], argv: Sequence[str] | None = None) -> NoReturn:
    """Main of an asyncio child: `factory(host)`, or `factory(host, http_socket)` where the supervisor passed one."""
    args, config = _begin(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_async(factory, args, config))
    sys.exit(0)


def run_sync(factory: Callable[[ThreadHost], SyncActor], argv: Sequence[str] | None = None) -> NoReturn:
    """Main of the executor: `factory(host).run()` in the process's main thread."""
    args, config = _begin(argv)
    uplink, fabric = _wire(args)
    host = ThreadHost(args.name, args.epoch, config, fabric, uplink)
    _obey_only_the_supervisor(host)
    try:
        uplink.start(host)
        actor = factory(host)
        host.attach(actor)
        actor.run()
    except Exception as error:
        _report(host, uplink, error)
    uplink.close()
    fabric.close()
    sys.exit(0)


async def _run_async(factory: Callable[..., Actor], args: ChildArgs, config: Config) -> None:
    uplink, fabric = _wire(args)
    host = AsyncHost(args.name, args.epoch, config, fabric, uplink)
    _obey_only_the_supervisor(host)
    asyncio.get_running_loop().set_exception_handler(_callback_watch(host, is_strict=args.http_fd < 0))
    try:
        uplink.start(host)
        actor = factory(host) if args.http_fd < 0 else factory(host, socket.socket(fileno=args.http_fd))
        host.attach(actor)
        await actor.run()
    except Exception as error:
        _report(host, uplink, error)
    host.close()
    uplink.close()
    fabric.close()


def _callback_watch(host: AsyncHost, is_strict: bool) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Errors that escape leave requests without an end, so they are fatal. A failed task is only where `is_strict`: a
    gateway has one per request, and one request must not end the others.
    """

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = escaped_error(context, is_strict)
        if error is not None:
            host.fatal("crashed", f"{type(error).__name__}: {error}")

    return on_exception


def _begin(argv: Sequence[str] | None) -> tuple[ChildArgs, Config]:
    """Before anything else: die with the parent, then read the configuration it left in the run directory."""
    args = parse(sys.argv[1:] if argv is None else argv)
    _die_with_parent(args.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = read_config(args.run_dir)
    logs.configure(config.log)
    _log.info("started", actor=args.name, epoch=args.epoch, pid=os.getpid())
    return args, config


def _die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL at the parent's end; a parent that ended before the request shows as another getppid."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_ORPHANED)


def _obey_only_the_supervisor(host: HostBase) -> None:
    """SIGTERM ends the process at once after the supervisor's Stop, and means nothing before it."""

    def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
        if host.is_stopping:
            os._exit(0)
        _log.info("sigterm_left_to_supervisor", actor=host.name, epoch=host.epoch)

    signal.signal(signal.SIGTERM, on_sigterm)


def _wire(args: ChildArgs) -> tuple[ZmqUplink, Fabric]:
    return ZmqUplink(ipc_address(args.run_dir / SUPERVISOR_SOCKET), args.parent_pid), ZmqFabric(args.run_dir)


def _report(host: HostBase, uplink: ZmqUplink, error: Exception) -> NoReturn:
    """An exception that reached the top: tell the supervisor in one line, the log in full, and leave."""
    _log.error("crashed", actor=host.name, epoch=host.epoch, exception=traceback.format_exc())
    code = getattr(error, "code", "")  # ours explain themselves
    host.fatal(code or "crashed", str(error) if code else f"{type(error).__name__}: {error}")
    raise SystemExit(EXIT_FATAL)
