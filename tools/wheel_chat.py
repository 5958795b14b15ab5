"""Proof that the wheel works alone: build it, install it into a fresh venv, serve from another directory, chat once.

Run by CI through `make wheel-chat`. Uses nothing of the working tree after the build; knows only the command line and
the HTTP endpoint, like any user.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="wheel_chat", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the fresh venv")
    parser.add_argument("--torch", default="torch", help="requirement to install torch by")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="epicycle-wheel-") as scratch:
        reply = chat_from_wheel(Path(scratch), arguments.python, arguments.torch)
    text = reply["choices"][0]["message"]["content"]
    print(f"the wheel says {text!r} in {reply['usage']['loops']} loops")
    return 0 if text.strip() else 1


def chat_from_wheel(scratch: Path, python: str, torch: str) -> dict[str, Any]:
    """Builds, installs and serves inside `scratch`; returns the body of one chat completion."""
    root = Path(__file__).resolve().parents[1]
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(scratch), str(root))
    (wheel,) = scratch.glob("*.whl")
    venv = scratch / "venv"
    run(python, "-m", "venv", str(venv))
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, torch)
    run(*pip, str(wheel))
    return serve_and_chat(scratch, venv / "bin" / "epicycle")


def serve_and_chat(scratch: Path, epicycle: Path) -> dict[str, Any]:
    log = (scratch / "serve.log").open("wb")
    run_dir = scratch / "run"
    command = [str(epicycle), "serve", "--port", "0", "--run-dir", str(run_dir)]
    server = subprocess.Popen(command, cwd=scratch, stdout=log, stderr=subprocess.STDOUT)
    try:
        base = f"http://127.0.0.1:{wait_until_ready(run_dir, server)}"
        return post(f"{base}/v1/chat/completions", {"messages": [{"role": "user", "content": "How are you?"}]})
    except Exception:
        print((scratch / "serve.log").read_text(errors="replace"), file=sys.stderr)
        raise
    finally:
        server.terminate()
        server.wait(STOP_TIMEOUT_S)


def wait_until_ready(run_dir: Path, server: subprocess.Popen[bytes]) -> int:
    """The port, once /readyz answers 200. Raises RuntimeError when the server dies or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(0.2)
        for instance in run_dir.rglob("instance.json"):
            port = int(json.loads(instance.read_text())["port"])
            if is_ready(port):
                return port
    raise RuntimeError(f"no ready server: exit code {server.poll()} within {START_TIMEOUT_S:.0f} s")


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
