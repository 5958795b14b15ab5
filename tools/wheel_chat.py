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
import urllib.request
from pathlib import Path
from typing import Any

from epicycle.tools.local_server import local_server


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
    with local_server(scratch, epicycle=[str(venv / "bin" / "epicycle")]) as server:
        message = {"role": "user", "content": "How are you?"}
        return post(f"{server.base_url}/v1/chat/completions", {"messages": [message]})


def post(url: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
