"""The commands of docs/replay.md, run as they stand against a server, do what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live.server import LiveServer, live_server

PAGE = Path(__file__).parents[3] / "docs" / "replay.md"
SERVED, ALONE = "http://127.0.0.1:8000", "zmq://"
DEADLINE_S = 100.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(first_topology: str) -> Iterator[LiveServer]:
    with live_server(first_topology, "--executor", "mock") as server:
        yield server


@pytest.fixture(scope="module")
def folder(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every block of the page was run, in order."""
    where = tmp_path_factory.mktemp("replay")
    (where / "bin").mkdir()
    command = where / "bin" / "epicycle"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m epicycle "$@"\n')
    command.chmod(0o755)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = "\n".join(blocks).replace(SERVED, server.base_url).replace(f"{ALONE} ", f"zmq://{server.run_dir} ")
    path = f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=where, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert 0 == ended.returncode, ended.stderr
    return where


def summary(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "rows"),
    [("summary", 64), ("closed", 47), ("trace", 47), ("cold", 24), ("warm", 24), ("shallow", 47), ("zmq", 64)],
)
def test_every_row_is_answered(name: str, rows: int, folder: Path) -> None:
    found = summary(folder, name)
    assert {"ok": rows} == found["requests"]
    assert found["is_valid"], found["warnings"]


def test_the_record_has_a_line_for_every_request(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert 64 == len({one["id"] for one in records})
    assert all(len(one["exit_depths"]) == one["tokens_out"] for one in records)


def test_the_report_is_a_page(folder: Path) -> None:
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_fewer_conversations_are_fewer(folder: Path) -> None:
    found = summary(folder, "rate")
    assert 8 == found["by_turn"][0]["requests"]
    assert "rate" == found["schedule"]["mode"]


def test_a_fixed_salt_makes_the_second_run_warm(folder: Path) -> None:
    assert summary(folder, "cold")["cache_hit_share"] < 0.9 < summary(folder, "warm")["cache_hit_share"]


def test_fields_for_every_body_are_sent(folder: Path) -> None:
    assert summary(folder, "shallow")["mean_loops"] <= 3 + 1 / 16  # the first output runs full depth


def test_the_bad_row_is_counted_and_the_good_ones_are_sent(folder: Path) -> None:
    found = summary(folder, "mooncake")
    assert ({"ok": 2}, {"bad row": 1}) == (found["requests"], found["rows"]["left_out"])
    assert found["cache_hit_share"] > 0


def test_the_error_shown_is_the_error_told(folder: Path, server: LiveServer) -> None:
    shown = re.findall(r"^epicycle replay: .*", PAGE.read_text(), re.MULTILINE)
    words = [sys.executable, "-m", "epicycle", "replay", "mooncake.jsonl", "--target", server.base_url]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (1, shown) == (ended.returncode, ended.stderr.splitlines())
