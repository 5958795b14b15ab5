"""The README's examples, run as they stand against the live server, give what the README shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.live.server import DEADLINE_S, LiveServer

ROOT = Path(__file__).parents[3]
SERVED = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


def test_curl_gets_the_answer_shown(live: LiveServer) -> None:
    answer = json.loads(run(["bash", "-c", blocks("sh")[0].replace(SERVED, live.base_url)]))
    shown = json.loads(" ".join(line.strip() for line in blocks("json")[0].splitlines()))

    (choice,), (expected,) = answer["choices"], shown["choices"]
    assert expected["message"] == choice["message"]
    assert shown.keys() == answer.keys()
    assert expected.keys() == choice.keys()
    assert shown["usage"]["completion_tokens"] == len(choice["exit_depths"])
    assert answer["usage"]["loops"] == sum(choice["exit_depths"])


@pytest.mark.clients
def test_the_openai_client_prints_what_is_shown(live: LiveServer) -> None:
    pytest.importorskip("openai")
    program = blocks("python")[0].replace(SERVED, live.base_url)

    assert blocks("text")[0].strip() == run([sys.executable, "-c", program]).strip()
