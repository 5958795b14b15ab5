"""A run captured by several gateways under load, sent again over HTTP and ZeroMQ: every token leaves where it left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epicycle import AsyncClient
from epicycle.transport.trace_rows import TraceRow, decode_row
from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

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


@pytest.fixture(scope="module")
def captured(first_topology: str, tmp_path_factory: pytest.TempPathFactory) -> list[TraceRow]:
    folder: Path = tmp_path_factory.mktemp("record")
    flags = ["--record", str(folder / "run.jsonl"), "--slots", "8"]
    flags += [] if first_topology == "single-process" else ["--gateways", "2"]
    with live_server(first_topology, *flags) as server:
        choices = asyncio.run(serve_some(server))
    rows = [decode_row(line) for path in sorted(folder.iterdir()) for line in path.read_bytes().splitlines()]
    assert choices == len({row.request_id for row in rows}) == len(rows)
    assert any(1 in (row.exit_depths or []) for row in rows), "some tokens left early"
    return rows


async def test_a_captured_run_replays_to_the_same_depths(first_topology: str, captured: list[TraceRow]) -> None:
    with live_server(first_topology, "--exit-rule", "trace", "--slots", "8") as server:
        async with Calls(server.base_url) as calls, AsyncClient(run_dir=server.run_dir) as client:
            for row in captured:
                fields = {"max_tokens": row.output_length, "exit_trace": row.exit_depths, "ignore_eos": True}
                prompt = [5 + at % 90 for at in range(row.input_length or 0)]
                over_http = await calls.complete(prompt=prompt, **fields)
                over_zmq = await client.generate(prompt, **fields)

                assert row.exit_depths == over_http.choice.exit_depths
                assert row.exit_depths == over_zmq.choices[0].exit_depths
