"""`epicycle generate` against the live server: plain text into a pipe, bars on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from epicycle.tools.generate import BARS, bar, summary
from tests.e2e.live.calls import Calls
from tests.e2e.live.server import DEADLINE_S, LiveServer

PROMPT = "Once upon a time"
WORDS = ("generate", PROMPT, "--max-tokens", "10", "--temperature", "0", "--exit-threshold", "0.5")
ASKED = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "exit_threshold": 0.5}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(live: LiveServer) -> str:
    """What the command writes to a terminal that its stdout is."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    words = [sys.executable, "-m", "epicycle", *WORDS, "--run-dir", str(live.run_dir)]
    with subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE, env=environment) as command:
        os.close(theirs)
        written = b""
        while data := _read(ours):
            written += data
        os.close(ours)
        assert 0 == command.wait(DEADLINE_S)
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed: how a terminal says that nothing more comes
        return b""


async def test_a_pipe_gets_the_text_and_stderr_the_summary(live: LiveServer, calls: Calls) -> None:
    expected = (await calls.complete(**ASKED)).choice
    ended = await asyncio.to_thread(live.command, *WORDS)

    assert 0 == ended.returncode
    assert f"{expected.text}\n" == ended.stdout
    assert f"{summary(expected.exit_depths)}\n" == ended.stderr


async def test_a_terminal_gets_a_bar_for_each_token(live: LiveServer, calls: Calls) -> None:
    expected = (await calls.complete(**ASKED)).choice
    written = await asyncio.to_thread(on_terminal, live)
    shown = COLOUR.sub("", written)
    loops = expected.exit_depths[0]

    assert written != shown
    assert [bar(depth, loops) for depth in expected.exit_depths] == [letter for letter in shown if letter in BARS]
    assert expected.text == "".join(letter for letter in shown if letter not in BARS).rstrip("\r\n")


async def test_a_chat_message_gets_an_answer(live: LiveServer) -> None:
    words = ("generate", "What is 2 plus 3?", "--chat", "--temperature", "0")
    ended = await asyncio.to_thread(live.command, *words)

    assert (0, "2 plus 3 is 5.\n") == (ended.returncode, ended.stdout)


async def test_a_refusal_is_told_and_the_exit_code_is_1(live: LiveServer) -> None:
    ended = await asyncio.to_thread(live.command, *WORDS[:2], "--max-tokens", "5000")

    assert (1, "") == (ended.returncode, ended.stdout)
    assert "max_tokens" in ended.stderr


def test_without_a_server_one_runs_for_as_long_as_the_answer(short_dir: Path) -> None:
    words = [sys.executable, "-m", "epicycle", "generate", "What is 2 plus 3?", "--chat", "--temperature", "0"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(short_dir), "TMPDIR": str(short_dir)}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=2 * DEADLINE_S, check=False)

    assert (0, "2 plus 3 is 5.\n") == (ended.returncode, ended.stdout)
    assert "no server runs; starting one with embedded:ouro" == ended.stderr.splitlines()[0]
    assert [] == list(short_dir.iterdir())
