"""A server under test: starts it, asks for its health, signals its processes, and leaves nothing behind.

Waiting is polling of a condition with a deadline; a condition that never comes fails with the server's log.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from epicycle.transport.client import ask_health
from epicycle.transport.wire.control import ActorHealth, HealthReply
from epicycle.transport.zmq_link import ipc_address

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02


class Server:
    """`command` (what follows `python -m`) runs with `--port 0` and a run directory of its own until the block ends."""

    def __init__(self, command: str, *flags: str, fake: dict[str, str] | None = None, port: int = 0) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="epi-"))
        self.run_dir.chmod(0o700)
        self.log = self.run_dir.with_suffix(".log")
        self.port = port
        words = [sys.executable, "-m", *command.split(), "--port", str(port), "--run-dir", str(self.run_dir), *flags]
        environment = os.environ | {"EPICYCLE_FAKE": json.dumps(fake or {}), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pids = self.pids()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def wait_up(self, timeout_s: float = 20.0) -> Server:
        """Until the start line is printed; remembers the port."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline().decode() if readable else ""
        found = re.search(r"(\d+)\s*$", line)
        assert found is not None, f"no start line but {line!r}; log:\n{self.text()}"
        self.port = int(found.group(1))
        return self

    def text(self) -> str:
        return self.log.read_text()

    def health(self, *, is_deep: bool = False) -> HealthReply:
        return asyncio.run(ask_health(ipc_address(self.run_dir / "sup"), is_deep=is_deep, timeout_s=3.0))

    def actor(self, name: str) -> ActorHealth:
        return next(actor for actor in self.health().actors if actor.name == name)

    def pids(self) -> list[int]:
        """The living children, as the kernel tells."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in children.split()]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> float:
        """Poll until `condition` is true; the seconds it took."""
        start_s = time.monotonic()
        while not condition():
            assert time.monotonic() - start_s < timeout_s, f"{what}: not within {timeout_s} s; log:\n{self.text()}"
            time.sleep(POLL_S)
        return time.monotonic() - start_s

    def until_status(self, status: str, timeout_s: float = 10.0) -> float:
        return self.until(lambda: self.health().status == status, f"health {status}", timeout_s)

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.actor(name).pid, signum)

    def wait_exit(self, timeout_s: float = 15.0) -> int:
        """The exit code; the log goes to the test's output, for when it isn't the expected one."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; log:\n{self.text()}") from None
        print(self.text())
        return code


def is_alive(pid: int) -> bool:
    """Whether a process exists and isn't a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
