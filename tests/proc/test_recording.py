"""A recording when processes die or drain: whole rows only, nothing overwritten, nothing lost that had ended."""

from __future__ import annotations

import signal
from collections import Counter
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


def is_back(server: Server) -> bool:
    return server.actor("gw0").epoch == 2 and server.health().status == "healthy"


async def test_a_killed_gateway_leaves_whole_rows_and_its_successor_another_file(file: Path) -> None:
    with Server("epicycle serve", *MOCK, "--record", str(file)) as server:
        server.wait_up()
        async with Load(server.port, COUNT, tokens=5) as load:
            await load.over(10.0)
        server.until(lambda: len(rows(file)) == COUNT, "rows of the first gateway")
        async with Load(server.port, COUNT):
            server.kill("gw0")
            server.until(
                lambda: server.actor("gw0").epoch == 2 and server.health().status == "healthy", "a new gateway"
            )
        async with Load(server.port, COUNT, tokens=7) as load:
            await load.over(10.0)
        server.process.send_signal(signal.SIGTERM)
        assert 0 == server.wait_exit()
    first, second = rows(file.with_name("run.1.jsonl")), rows(file)

    assert [5] * COUNT == [row.output_length for row in first]
    assert Counter({7: COUNT}) == Counter(row.output_length for row in second if row.meta["finish"] == "length")
    assert 2 * COUNT <= len({row.request_id for row in first + second}) == len(first + second)
    assert {tuple(row.hash_ids or ()) for row in first} <= {tuple(row.hash_ids or ()) for row in second}, "one key"


async def test_a_drain_records_what_finishes_in_it(file: Path) -> None:
    with Server("epicycle serve", *MOCK, "--gateways", "2", "--record", str(file)) as server:
        server.wait_up()
        async with Load(server.port, COUNT, tokens=60) as load:
            server.process.send_signal(signal.SIGTERM)
            assert {"done": COUNT} == await load.over(10.0)
        assert 0 == server.wait_exit()
    written = [row for name in ("run.gw0.jsonl", "run.gw1.jsonl") for row in rows(file.with_name(name))]

    assert [60] * COUNT == [row.output_length for row in written]


async def test_a_path_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with Server("epicycle serve", *MOCK, "--record", str(tmp_path / "nowhere" / "run.jsonl")) as server:
        assert 1 == server.wait_exit()
        assert "record.file" in server.text() and "No such file" in server.text()


async def test_a_server_records_with_a_key_of_its_own(file: Path) -> None:
    for _ in range(2):
        with Server("epicycle serve", *MOCK, "--record", str(file)) as server:
            server.wait_up()
            assert 200 == await ask(server.port)
            server.process.send_signal(signal.SIGTERM)
            assert 0 == server.wait_exit()
    (first,), (second,) = rows(file.with_name("run.1.jsonl")), rows(file)

    assert first.input_length == second.input_length
    assert first.hash_ids != second.hash_ids
