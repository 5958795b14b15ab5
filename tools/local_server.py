"""A server of one's own for as long as a command needs it: start, wait until it would admit, stop.

What `generate` (when no server runs), the benchmarks and the wheel check share. It knows the command line, the run
directory and /readyz, like any user of the server.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
EPICYCLE = (sys.executable, "-m", "epicycle")


@dataclass(frozen=True)
class LocalServer:
    """A ready server: `run_dir` is what --run-dir of the other commands takes."""

    port: int
    run_dir: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def local_server(
    scratch: Path, arguments: Sequence[str] = (), epicycle: Sequence[str] = EPICYCLE
) -> Iterator[LocalServer]:
    """Serve on a free port with its files under `scratch`, until the block ends.

    Raises RuntimeError with the server's log when it doesn't become ready.
    """
    run_dir = scratch / "run"
    command = [*epicycle, "serve", "--port", "0", "--run-dir", str(run_dir), *arguments]
    log_path = scratch / "serve.log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, cwd=scratch, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield LocalServer(wait_until_ready(run_dir, server, log_path), run_dir)
    finally:
        server.terminate()
        server.wait(STOP_TIMEOUT_S)


def wait_until_ready(run_dir: Path, server: subprocess.Popen[bytes], log_path: Path) -> int:
    """The port, once /readyz answers 200."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(POLL_S)
        port = published_port(run_dir)
        if port and is_ready(port):
            return port
    log, code = log_path.read_text(errors="replace"), server.poll()
    fate = f"within {START_TIMEOUT_S:.0f} s" if code is None else f"but exit code {code}"
    raise RuntimeError(f"no ready server {fate}:\n{log}")


def published_port(run_dir: Path) -> int:
    """The port in instance.json; 0 while there is none."""
    try:
        return int(json.loads((run_dir / "instance.json").read_text())["port"])
    except (OSError, ValueError, KeyError):
        return 0


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
