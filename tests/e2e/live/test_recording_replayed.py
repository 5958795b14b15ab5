"""A run captured by several gateways under load, sent again over HTTP and ZeroMQ: every token leaves where it left."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from epicycle import AsyncClient
from epicycle.transport.trace_rows import TraceRow, decode_row
from tests.e2e.live.calls import Calls
from tests.e2e.live.server import DEADLINE_S, LiveServer, live_server

EARLY = {"exit_threshold": 0.5, "min_loops": 1, "temperature": 0}
STORIES = ["Once upon a time", "The old ship", "What is 2 plus 3?", "A fox named Pip", "Tea is"]


async def serve_some(server: LiveServer) -> int:
    """Requests over both ways in, whose number of choices is returned."""
    async with Calls(server.base_url) as calls, AsyncClient(run_dir=server.run_dir) as client:
        await asyncio.gather(
            *(calls.complete(prompt=story, max_tokens=4 + at, **EARLY) for at, story in enumerate(STORIES)),
            calls.complete(prompt=STORIES[0], n=2, max_tokens=6, stream=True, seed=1, **EARLY | {"temperature": 0.9}),
            calls.chat("What does happy mean?", max_tokens=12, **EARLY),
            client.generate("The old ship", max_tokens=7, **EARLY),
            client.chat([{"role": "user", "content": "Who are you?"}], max_tokens=7, **EARLY),
        )
    return len(STORIES) + 5


@dataclass(frozen=True)
class Captured:
    files: list[Path]
    rows: list[TraceRow]


@pytest.fixture(scope="module", params=[(), ("--record-text",)], ids=["hashed", "text"])
def captured(request: pytest.FixtureRequest, first_topology: str, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder: Path = tmp_path_factory.mktemp("record")
    flags = ["--record", str(folder / "run.jsonl"), "--slots", "8", *request.param]
    flags += [] if first_topology == "single-process" else ["--gateways", "2"]
    with live_server(first_topology, *flags) as server:
        choices = asyncio.run(serve_some(server))
    files = sorted(folder.iterdir())
    rows = [decode_row(line) for path in files for line in path.read_bytes().splitlines()]
    assert choices == len({row.request_id for row in rows}) == len(rows)
    assert any(1 in (row.exit_depths or []) for row in rows), "some tokens left early"
    return Captured(files, rows)


@pytest.fixture(scope="module")
def tracing(first_topology: str) -> Iterator[LiveServer]:
    with live_server(first_topology, "--exit-rule", "trace", "--slots", "8") as server:
        yield server


@pytest.mark.parametrize("way", ["http", "zmq"])
async def test_a_captured_run_replays_to_the_same_depths(
    tracing: LiveServer, captured: Captured, tmp_path: Path, way: str
) -> None:
    target = tracing.base_url if way == "http" else f"zmq://{tracing.run_dir}"
    out = tmp_path / "replayed.jsonl"
    words = ["replay", *map(str, captured.files), "--target", target, "--out", str(out), "--no-progress"]
    code = await asyncio.to_thread(replay, words)
    replayed = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}

    assert 0 == code
    assert {row.request_id: row.exit_depths for row in captured.rows} == {
        name: record["exit_depths"] for name, record in replayed.items()
    }
    assert {row.request_id: row.input_length for row in captured.rows} == {
        name: record["tokens_in"] for name, record in replayed.items()
    }


def replay(words: list[str]) -> int:
    command = [sys.executable, "-m", "epicycle", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    print(ended.stdout, ended.stderr)
    return ended.returncode
