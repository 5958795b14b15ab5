"""Workloads over HTTP: an asyncio client of /v1/completions that streams, with prompts as token ids.

Owns the client's clock and the reading of events. It works against any server with that route that tells token ids; the
fields of ours (thresholds, depths, cache salt) are sent only where a workload asks for them or the server is ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from epicycle.tools.bench_load import ARRIVAL, BenchRequest, Load, Record, Timed
from epicycle.tools.bench_stats import RunResult, shared_window

DATA = b"data: "
JSON = {"Content-Type": "application/json"}
LONGEST_LINE_BYTES = 8 << 20  # a first event repeats the prompt
COUNTERS = (
    "ticks",
    "rows_in_ticks",
    "mixed_depth_ticks",
    "loops_saved",
    "starved",
    "prompt_tokens",
    "prefix_hit_tokens",
)


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    exit_depths: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class HttpError(Exception):
    """The server refused, failed, or gave another number of tokens than asked for."""


def run_http(base_url: str, load: Load, salt: str) -> RunResult:
    """One run. `salt` keeps a server's prefix cache from remembering earlier runs. Raises HttpError."""
    return asyncio.run(measure(base_url, load, salt))


async def measure(base_url: str, load: Load, salt: str) -> RunResult:
    """As `run_http`, inside a running loop."""
    limits = aiohttp.ClientTimeout(total=None, sock_read=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        base_url, timeout=limits, connector=connector, read_bufsize=LONGEST_LINE_BYTES
    ) as session:
        extra = extra_fields(await _model_card(session), salt)
        before = await _counters(session)
        records = await _drive(session, load, extra)
        after = await _counters(session)
    streams = [one for one in records if one.label != ARRIVAL]
    is_one_wave = len(streams) == min(load.workload.streams, load.workload.requests) == len(records)
    return RunResult(
        records=records,
        decode_tokens_per_s=shared_window(records) if is_one_wave else None,
        decode_streams=len(streams) if is_one_wave else 0,
        counters={name: after[name] - before.get(name, 0.0) for name in after},
    )


def model_card(base_url: str) -> dict[str, Any]:
    """What the server says of its model."""

    async def ask() -> dict[str, Any]:
        async with aiohttp.ClientSession(base_url) as session:
            return await _model_card(session)

    return asyncio.run(ask())


async def _model_card(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/v1/models") as answer:
        if answer.status != 200:
            raise HttpError(f"GET /v1/models: HTTP {answer.status}")
        card: dict[str, Any] = (await answer.json())["data"][0]
        return card


def extra_fields(card: Mapping[str, Any], salt: str) -> dict[str, object]:
    """The served model's name, and a cache salt where the server says that it runs loops, as ours does."""
    return {"model": card["id"]} | ({"cache_salt": salt} if "loops" in card else {})


async def _drive(session: aiohttp.ClientSession, load: Load, extra: Mapping[str, object]) -> list[Record]:
    done: list[tuple[int, Record]] = []

    async def one(timed: Timed) -> None:
        request = timed.request
        await asyncio.sleep(timed.delay_s)
        record = await _request(session, request, extra)
        done.append((request.number, record))
        for follower in load.after(request, record.tokens):
            group.create_task(one(follower))

    try:
        async with asyncio.TaskGroup() as group:
            for timed in load.start():
                group.create_task(one(timed))
    except* HttpError as failed:
        raise failed.exceptions[0] from None
    return [record for _, record in sorted(done, key=lambda pair: pair[0])]


async def _request(session: aiohttp.ClientSession, request: BenchRequest, extra: Mapping[str, object]) -> Record:
    record = Record(
        number=request.number,
        label=request.label,
        prompt_tokens=len(request.prompt),
        submitted_s=time.perf_counter(),
    )
    body = msgspec.json.encode(body_of(request, extra))
    async with session.post("/v1/completions", data=body, headers=JSON) as answer:
        if answer.status != 200:
            raise HttpError(f"request {request.number}: HTTP {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            take_line(record, line, time.perf_counter())
    if len(record.token_s) != request.output:
        text = f"request {request.number} got {len(record.token_s)} token ids of {request.output}"
        raise HttpError(f"{text}; the server must honour ignore_eos and return_token_ids")
    return record


def body_of(request: BenchRequest, extra: Mapping[str, object]) -> dict[str, object]:
    """The JSON body of a request: greedy, no end ids, streamed with ids."""
    body: dict[str, object] = {
        "prompt": request.prompt,
        "max_tokens": request.output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if request.threshold < 1:
        body["exit_threshold"] = request.threshold
    if request.depths:
        body["exit_trace"] = request.depths
    return body | dict(extra)


def take_line(record: Record, line: bytes, now_s: float) -> None:
    """Add one line of the stream to its record. Raises HttpError where it tells of one."""
    if not line.startswith(DATA) or not line[len(DATA) :].startswith(b"{"):
        return
    event = _decode(line[len(DATA) :])
    if event.error is not None:
        raise HttpError(f"the stream ended with {event.error}")
    for choice in event.choices:
        record.tokens.extend(choice.token_ids)
        record.token_s.extend([now_s] * len(choice.token_ids))
        record.depths.extend(choice.exit_depths)


async def _counters(session: aiohttp.ClientSession) -> dict[str, float]:
    """Our server's totals by their names in reports; empty from other servers."""
    async with session.get("/metrics") as answer:
        return parse_counters(await answer.text()) if answer.status == 200 else {}


def parse_counters(text: str) -> dict[str, float]:
    """Sums over labels of the counters that bench reports, from Prometheus text."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0].removeprefix("epicycle_").removesuffix("_total")
        if head.startswith("epicycle_") and name in COUNTERS:
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
