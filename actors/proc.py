"""Child processes: start in a session of their own, notice their end through a pidfd, signal and reap by group.

Must run in the supervisor's main thread: PR_SET_PDEATHSIG fires when the thread that started the child ends. Knows
module names, command lines and the exit status of a child that has said why, not what the children say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from epicycle.actors.host_zmq import EXIT_FATAL


@dataclass(frozen=True)
class ChildSpec:
    """A child to run: `module` as in `python -m`, and the listening socket it inherits (-1: none)."""

    name: str
    kind: str
    module: str
    http_fd: int = -1


class Processes:
    """The living children by name. `on_exit(name, reason, has_last_words)` is called on the loop, after the child was
    reaped; it has sent a Fatal where it has last words."""

    def __init__(self, specs: Sequence[ChildSpec], run_dir: Path, on_exit: Callable[[str, str, bool], None]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._alive: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, name: str, epoch: int) -> int:
        """Start a child; its pid, which is also its process group. Raises OSError when it can't be started."""
        spec = self._specs[name]
        child = subprocess.Popen(
            self._command(spec, epoch),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if spec.http_fd < 0 else (spec.http_fd,),
        )
        sentinel = os.pidfd_open(child.pid)
        self._alive[name] = (child, sentinel)
        self._loop.add_reader(sentinel, self._reap, name)
        return child.pid

    def kill(self, names: Sequence[str], signum: signal.Signals) -> None:
        """Signal the groups of those who still live."""
        for name in names:
            if name in self._alive:
                _signal_group(self._alive[name][0].pid, signum)

    @property
    def alive(self) -> list[str]:
        return list(self._alive)

    def _command(self, spec: ChildSpec, epoch: int) -> list[str]:
        command = [sys.executable, "-m", spec.module, "--name", spec.name, "--epoch", str(epoch)]
        command += ["--run-dir", str(self._run_dir), "--parent-pid", str(os.getpid())]
        return command if spec.http_fd < 0 else [*command, "--http-fd", str(spec.http_fd)]

    def _reap(self, name: str) -> None:
        child, sentinel = self._alive.pop(name)
        self._loop.remove_reader(sentinel)
        os.close(sentinel)
        _signal_group(child.pid, signal.SIGKILL)  # before the reaping: until then the number can't be another's
        status = child.wait()
        self._on_exit(name, _ending(status), status == EXIT_FATAL)


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def _ending(status: int) -> str:
    """How a process ended, for people."""
    if status >= 0:
        return f"exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
