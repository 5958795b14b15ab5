"""Replays against a whole server in this loop: schedules, threaded sessions, exit traces, refusals, deaths."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epicycle.tools.replay import parser, plan_of
from epicycle.tools.replaying.http_target import HttpTarget
from epicycle.tools.replaying.run import replay
from epicycle.transport.config import EngineConfig
from epicycle.transport.trace_rows import TraceRow, encode_row
from tests.fakes.replay import row
from tests.fakes.stack import MOCK, Stack

TRACING = msgspec.structs.replace(MOCK, engine=EngineConfig(exit_rule="trace"))


def written(folder: Path, rows: list[TraceRow]) -> str:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(map(encode_row, rows)))
    return str(path)


async def replayed(url: str, *words: str) -> dict[str, Any]:
    return await replay(plan_of(parser().parse_args(list(words))), HttpTarget(url))


def sessions(count: int, turns: int) -> list[TraceRow]:
    return [
        row(f"{session}/{turn}", f"{session}", input_length=20, output_length=4, message_mode="delta", timestamp=turn)
        for turn in range(turns)
        for session in range(count)
    ]


@pytest.mark.parametrize("schedule", ["closed", "trace", "rate"])
async def test_a_schedule_sends_every_row(schedule: str, base_url: str, tmp_path: Path) -> None:
    trace = written(tmp_path, sessions(6, 3))
    summary = await replayed(base_url, trace, "--schedule", schedule, "--rate", "200", "--concurrency", "4")
    assert {"ok": 18} == summary["requests"]
    assert 18 * 4 == summary["output_tokens"]
    assert {"length": 18} == summary["finish_reasons"]
    assert summary["schedule_lag_ms"]["count"] == 18
    assert "epicycle" == summary["target"]["speaks"]
    assert 16 == len(summary["target"]["server"]["config"])


async def test_turns_that_go_on_find_their_history_in_the_cache(base_url: str, tmp_path: Path) -> None:
    trace = written(tmp_path, sessions(3, 4))
    summary = await replayed(base_url, trace)
    first, *later = summary["by_turn"]
    assert (0.0, 3) == (first["cache_hit_share"], first["requests"])
    assert all(0.3 < turn["cache_hit_share"] < 1 for turn in later)


async def test_a_second_run_is_as_cold_as_the_first(base_url: str, tmp_path: Path) -> None:
    trace = written(tmp_path, [row("a", hash_ids=[1, 2], block_size=32, input_length=64)])
    for _ in range(2):
        assert 0.0 == (await replayed(base_url, trace))["cache_hit_share"]
    shares = [(await replayed(base_url, trace, "--salt", "mine"))["cache_hit_share"] for _ in range(2)]
    assert 0.0 == shares[0] < shares[1]


async def test_recorded_depths_are_followed(tmp_path: Path) -> None:
    trace = written(tmp_path, [row("a", token_ids=[9, 8, 7], output_length=5, exit_depths=[4, 1, 3, 2, 4])])
    out = tmp_path / "out.jsonl"
    async with Stack(TRACING) as stack:
        summary = await replayed(stack.base_url, trace, "--out", str(out))
    assert {"ok": 1} == summary["requests"]
    assert [4, 1, 3, 2, 4] == json.loads(out.read_text())["exit_depths"]


async def test_chats_go_to_the_chat_route_with_what_was_said(base_url: str, tmp_path: Path) -> None:
    words = [{"role": "user", "content": "hello"}]
    rows = [row(f"{n}", "s", messages=words, message_mode="delta", output_length=3) for n in range(3)]
    summary = await replayed(base_url, written(tmp_path, rows))
    assert {"ok": 3} == summary["requests"]
    assert summary["prompt_tokens"] > 3 * 5


async def test_refusals_are_failures_with_their_code_and_no_latency(base_url: str, tmp_path: Path) -> None:
    rows = [row("a", "s", input_length=5000), row("b", "s"), row("c", "t")]
    summary = await replayed(base_url, written(tmp_path, rows))
    assert {"failed": 1, "skipped": 1, "ok": 1} == summary["requests"]
    assert ["context_length_exceeded"] == list(summary["failures"])
    assert 1 == summary["latency"]["ttft_ms"]["count"]


async def test_a_field_that_the_server_refuses_fails_its_row_only(base_url: str, tmp_path: Path) -> None:
    line = b'{"request_id": "b", "input_length": 1, "output_length": 1, "extra": {"seed": ' + b"9" * 400 + b"}}\n"
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line + encode_row(row("c")))
    summary = await replayed(base_url, str(path))
    assert {"failed": 1, "ok": 1} == summary["requests"]
    assert ["invalid_request_error"] == list(summary["failures"])


async def test_a_server_that_dies_fails_the_rest_and_nothing_hangs(tmp_path: Path) -> None:
    async with Stack() as stack:
        stack.allow(3)
        run = asyncio.create_task(replayed(stack.base_url, written(tmp_path, sessions(4, 3))))
        await stack.until_resident(4)
        await stack.kill_executor()
        stack.allow(1 << 30)
        stack.start_executor(2)
        summary = await run
    assert {"failed": 4, "skipped": 8} == summary["requests"]
    assert ["engine_lost"] == list(summary["failures"])
    assert not summary["is_valid"]
