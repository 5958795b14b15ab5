"""A recording when processes die or drain: whole rows only, nothing overwritten, nothing lost that had ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epicycle.transport.trace_rows import TraceRow, decode_row
from tests.proc.load import Load, ask
from tests.proc.server import Server

COUNT = 6
MOCK = ("--executor", "mock", "--mock-tick-ms", "5", "--slots", str(COUNT))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def rows(file: Path) -> list[TraceRow]:
    return [decode_row(line) for line in file.read_bytes().splitlines()]


def of_length(tokens: int, found: list[TraceRow]) -> list[TraceRow]:
    return [row for row in found if row.output_length == tokens]


@asynccontextmanager
async def recording(file: Path, *flags: str) -> AsyncIterator[Server]:
    """A server that has answered once; its orderly end is part of the block."""
    with Server("epicycle serve", *MOCK, "--record", str(file), *flags) as server:
        server.wait_up()
        await until_served(server)
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert 0 == server.wait_exit()


async def until_served(server: Server) -> None:
    """Bounded by the test's own timeout."""
    while await ask(server.port) != 200:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.02)


async def test_a_killed_gateway_leaves_whole_rows_and_its_successor_another_file(file: Path) -> None:
    async with recording(file) as server:
        async with Load(server.port, COUNT, tokens=5) as load:
            assert {"done": COUNT} == await load.over(10.0)
        server.until(lambda: len(of_length(5, rows(file))) == COUNT, "rows of the first gateway")
        async with Load(server.port, COUNT):
            await asyncio.to_thread(server.kill, "gw0")
        await asyncio.to_thread(server.until, lambda: server.actor("gw0").epoch == 2, "a new gateway")
        await until_served(server)
        async with Load(server.port, COUNT, tokens=7) as load:
            assert {"done": COUNT} == await load.over(10.0)
    first, second = rows(file.with_name("run.1.jsonl")), rows(file)

    assert (COUNT, 0) == (len(of_length(5, first)), len(of_length(5, second)))
    assert (0, COUNT) == (len(of_length(7, first)), len(of_length(7, second)))
    assert len({row.request_id for row in first + second}) == len(first + second)
    keyed_alike = {tuple(row.hash_ids or ()) for row in of_length(5, first)}
    assert keyed_alike == {tuple(row.hash_ids or ()) for row in of_length(7, second)}


async def test_a_drain_records_what_finishes_in_it(file: Path) -> None:
    async with recording(file, "--gateways", "2") as server, Load(server.port, COUNT, tokens=60) as load:
        server.process.send_signal(signal.SIGTERM)
        assert {"done": COUNT} == await load.over(10.0)
    written = [row for path in file.parent.glob("run.gw?.jsonl") for row in rows(path)]

    assert COUNT == len(of_length(60, written))


async def test_a_path_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with Server("epicycle serve", *MOCK, "--record", str(tmp_path / "nowhere" / "run.jsonl")) as server:
        assert 1 == server.wait_exit()
        assert "record.file" in server.text() and "No such file" in server.text()


async def test_every_server_has_a_key_of_its_own(file: Path) -> None:
    for _ in range(2):
        async with recording(file):
            pass
    first, second = rows(file.with_name("run.1.jsonl"))[0], rows(file)[0]

    assert first.input_length == second.input_length
    assert first.hash_ids != second.hash_ids
