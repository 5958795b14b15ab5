"""--record: what is served becomes a trace, hashed or in plain text, and replays to the same depths."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epicycle.transport.config import RecordConfig
from epicycle.transport.trace_rows import TraceRow, block_hashes, decode_row, encode_row
from epicycle.transport.wire.control import Drain
from tests.e2e.client import COMPLETIONS, HELLO, Client
from tests.fakes.stack import MOCK, UNLIMITED, Stack, until

EARLY = {"exit_threshold": 0.5, "min_loops": 1, "ignore_eos": True}
Recorded = Callable[..., AbstractAsyncContextManager[tuple[Stack, Client]]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def recorded(trace: Path) -> Recorded:
    @asynccontextmanager
    async def made(**fields: Any) -> AsyncIterator[tuple[Stack, Client]]:
        record = RecordConfig(file=str(trace), **({"salt": "pepper"} | fields))
        async with Stack(msgspec.structs.replace(MOCK, record=record)) as stack, Client(stack.base_url) as client:
            yield stack, client

    return made


def rows(trace: Path) -> list[TraceRow]:
    return [decode_row(line) for line in trace.read_bytes().splitlines()]


async def test_prompts_are_hashed_and_equal_beginnings_keep_equal_ids(recorded: Recorded, trace: Path) -> None:
    long, longer = list(range(40, 80)), list(range(40, 100))
    async with recorded() as (_, client):
        await client.complete(long, max_tokens=3, session_id="Jane Doe", **EARLY)
        depths = (await client.complete(longer, max_tokens=5, session_id="Jane Doe", **EARLY)).choice["exit_depths"]
        await client.complete(list(range(41, 81)), max_tokens=1)
    first, second, third = rows(trace)

    assert (40, 3, 16) == (first.input_length, first.output_length, first.block_size)
    assert first.hash_ids == block_hashes(long, 16, b"pepper")
    assert first.hash_ids is not None and second.hash_ids is not None and third.hash_ids is not None
    assert first.hash_ids[:2] == second.hash_ids[:2] and first.hash_ids[2] != second.hash_ids[2]
    assert not set(first.hash_ids) & set(third.hash_ids)
    assert depths == second.exit_depths
    assert first.session_id == second.session_id and third.session_id == ""
    assert not [row for row in (first, second, third) if b"Jane" in encode_row(row)]


async def test_turns_of_a_session_wait_for_one_another(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (_, client):
        for _ in range(2):
            await client.complete(max_tokens=2, session_id="s")
        await client.complete(max_tokens=2, session_id="other")
    first, second, other = rows(trace)

    assert ([], [first.request_id], []) == (first.wait_for, second.wait_for, other.wait_for)
    assert first.timestamp is not None and second.timestamp is not None and second.delay is not None
    assert first.delay is None
    lasted_ms = first.meta["e2e_ms"]
    assert abs(first.timestamp + lasted_ms + second.delay - second.timestamp) < 0.01  # rounded to microseconds


async def test_a_header_names_the_session_where_the_body_does_not(recorded: Recorded, trace: Path) -> None:
    async with recorded(text=True) as (_, client):
        for body in ({}, {}, {"session_id": "body"}):
            headers = {"X-Session-Affinity": "header"}
            await client.send("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **body}, headers=headers)
    first, second, third = rows(trace)

    assert ["header", "header", "body"] == [row.session_id for row in (first, second, third)]
    assert ([], [first.request_id], []) == (first.wait_for, second.wait_for, third.wait_for)


async def test_text_is_recorded_when_asked_for(recorded: Recorded, trace: Path) -> None:
    async with recorded(text=True) as (_, client):
        await client.complete("hello there", max_tokens=2, session_id="s", temperature=0.5, seed=7)
        await client.complete([5, 6, 7], max_tokens=2)
        await client.chat(HELLO, max_tokens=2)
    text, ids, chat = rows(trace)

    assert ("hello there", "s", None) == (text.text_input, text.session_id, text.hash_ids)
    assert (0.5, 7) == (text.extra["temperature"], text.extra["seed"])
    assert [5, 6, 7] == ids.token_ids
    assert HELLO == chat.messages


async def test_every_choice_is_a_row(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (_, client):
        answer = await client.complete(["a", "the old ship"], n=2, max_tokens=4, temperature=1.0, **EARLY)
    found = rows(trace)

    assert [choice["exit_depths"] for choice in answer.json["choices"]] == [row.exit_depths for row in found]
    assert 4 == len({row.request_id for row in found})
    assert found[0].hash_ids == found[1].hash_ids != found[2].hash_ids


async def test_what_was_cut_short_is_recorded_as_far_as_it_came(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (stack, client):
        stack.allow(6)
        fields = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
        _, writer = await client.dial("/v1/completions", fields)
        await stack.until_resident(1)
        await until(lambda: stack.ticks_left == 0)
        writer.close()
        await until(lambda: len(stack.gateway.core.table) == 0)
        stack.allow(UNLIMITED)
    (row,) = rows(trace)

    assert "cancelled" == row.meta["finish"]
    assert row.exit_depths is not None and row.output_length == len(row.exit_depths) < 900


async def test_requests_without_a_token_are_counted_and_left_out(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (_, client):
        await client.complete(max_tokens=0, echo=True)
        await client.complete(max_tokens=1)
        assert 1 == await client.metric('epicycle_record_dropped_total{cause="tokenless"}')
    assert 1 == len(rows(trace))


async def test_a_drain_leaves_nothing_unwritten(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (stack, client):
        await client.complete(max_tokens=2)
        stack.gateway_host.drain(Drain(1000))
        await until(lambda: stack.gateway_host.is_drained)
        assert 1 == len(rows(trace))


async def test_a_full_disk_costs_rows_and_nothing_else(
    recorded: Recorded, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async with recorded() as (stack, client):
        recorder = stack.gateway.core.recorder
        assert recorder is not None
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            assert 200 == (await client.complete(max_tokens=2)).status
            assert await asyncio.to_thread(recorder.writer.flush, 10)
        assert 1 == await client.metric('epicycle_record_dropped_total{cause="disk"}')
        assert 200 == (await client.complete(max_tokens=3)).status
        assert await asyncio.to_thread(recorder.writer.flush, 10)
        assert 1 == recorder.counters()["record_rows_total"]
    assert [3] == [row.output_length for row in rows(trace)]


async def test_a_server_that_does_not_record_has_no_recorder(stack: Stack) -> None:
    assert stack.gateway.core.recorder is None


async def test_a_recording_is_a_trace_file(recorded: Recorded, trace: Path) -> None:
    async with recorded() as (_, client):
        await client.complete("hello", max_tokens=9, **EARLY)
        await client.chat(max_tokens=9, **EARLY)
    captured = rows(trace)
    assert any(len(set(row.exit_depths or [])) > 1 for row in captured)
    server = msgspec.structs.replace(MOCK.server, trace_file=str(trace))
    engine = msgspec.structs.replace(MOCK.engine, exit_rule="trace")
    config = msgspec.structs.replace(MOCK, server=server, engine=engine)
    async with Stack(config) as stack, Client(stack.base_url) as client:
        for row in captured:
            answer = await client.complete("anything", trace_id=row.request_id, max_tokens=9, ignore_eos=True)
            assert row.exit_depths == answer.choice["exit_depths"]
