"""Prompts computed by one real executor and decoded by another, over NIXL on host memory: equal to one executor alone,
whoever leaves and whoever dies; and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live.calls import Answer, Calls, Running
from tests.e2e.live.server import LiveServer, live_server
from tests.proc.server import is_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12")),
        reason="NIXL isn't installed: pip install 'epicycle[nixl]'",
    ),
]

PAGE = 16
CHUNK = 64
SAME = ("--slots", "8", "--prompt-chunk", str(CHUNK))
SPLIT = ("--prefill", "cpu", "--decode", "cpu", "--set", "transfer.least_tokens=0")
SMALL = ("--set", "transfer.chunk_bytes=262144", "--set", "transfer.inflight_bytes=524288")
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 200)
SHM = Path("/dev/shm")


def prompts(count: int) -> list[dict[str, Any]]:
    """Requests of all lengths, greedy and drawn, leaving early and not."""
    asks: list[dict[str, Any]] = []
    for number in range(count):
        length = LENGTHS[number % len(LENGTHS)]
        ask = {
            "prompt": [70 + (number * 37 + at * 11) % 900 for at in range(length)],
            "max_tokens": 5,
            "ignore_eos": True,
            "logprobs": 1,
            "temperature": 0 if number % 2 else 0.9,
            "seed": number,
            "exit_threshold": 1.0 if number % 3 else 0.6,
        }
        asks.append(ask)
    return asks


async def answers(server: LiveServer, asks: list[dict[str, Any]], **more: Any) -> list[Answer]:
    async with Calls(server.base_url) as calls:
        return list(await asyncio.gather(*(calls.complete(**ask, **more) for ask in asks)))


@pytest.fixture(scope="module")
def split() -> Iterator[LiveServer]:
    with live_server("processes", *SAME, *SPLIT, *SMALL) as server:
        yield server


@pytest.fixture
async def calls(split: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(split.base_url) as calls:
        yield calls


def has_token(streams: list[Running]) -> bool:
    return any(stream.tokens for stream in streams)


def computes_prompts(server: LiveServer) -> bool:
    return server.metrics().total('epicycle_requests_running{executor="ex0"}') > 0


def own_shared_memory() -> set[Path]:
    """Files of this user's."""
    return {path for path in SHM.iterdir() if path.stat().st_uid == os.getuid()}


async def assert_empty(server: LiveServer) -> None:
    """Nothing runs, is on its way, or holds a page on either side."""
    metrics = await server.settled()
    for state in ("live", "leased"):
        assert 0 == metrics.total(f'epicycle_kv_pages{{executor="ex0",state="{state}"}}'), state
        assert 0 == metrics.total(f'epicycle_kv_pages{{executor="ex1",state="{state}"}}'), state
    assert (0, 0) == (metrics.total("epicycle_transfers_in_flight"), metrics.total("epicycle_uneven_census_total"))


def long_prompts(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests whose prompts take a while, so that a kill finds them in every stage."""
    return [
        ask | {"prompt": [70 + (number * 37 + at * 11) % 900 for at in range(250)], "max_tokens": max_tokens}
        for number, ask in enumerate(prompts(count))
    ]


@pytest.mark.parametrize(
    ("model", "layout"),
    [("embedded:ouro", "last_exited"), ("embedded:ouro", "budgeted:2"), ("embedded:huginn", "last_exited")],
)
async def test_a_split_says_what_one_executor_says(model: str, layout: str) -> None:
    """Prompts of a token, about a page, about a chunk, and past what may be in flight."""
    asks = prompts(16)
    flags = ("--model", model, "--kv-layout", layout, *SAME)
    with live_server("processes", *flags) as alone:
        expected = await answers(alone, asks)
    with live_server("processes", *flags, *SPLIT, *SMALL) as server:
        told = await answers(server, asks)
        warm = await answers(server, asks[:8])
        metrics = await server.settled()
        assert metrics.total("epicycle_transfers_total") >= len(asks)
        assert 0 == metrics.total("epicycle_transfer_failures_total")
        assert 0 == metrics['epicycle_generation_tokens_total{executor="ex0"}']
        await assert_empty(server)
    assert [200] * len(asks) == [answer.status for answer in told]
    assert [] == [
        number for number, pair in enumerate(zip(expected, told, strict=True)) if pair[0].choice != pair[1].choice
    ]
    assert [answer.choice for answer in expected[:8]] == [answer.choice for answer in warm]


async def test_a_single_process_copies() -> None:
    asks = prompts(8)
    with live_server("single-process", *SAME, *SPLIT) as server:
        told = await answers(server, asks)
        again = await answers(server, asks)
    assert [200] * 8 == [answer.status for answer in told]
    assert [answer.choice for answer in told] == [answer.choice for answer in again]


async def test_clients_that_leave_take_their_pages_with_them(split: LiveServer, calls: Calls) -> None:
    """At whatever stage they leave: in the queue, in the prompt, on the way, between tokens."""
    for pause in range(4):
        asks = [ask | {"cache_salt": f"leave{pause}"} for ask in long_prompts(4 + pause, max_tokens=400)]
        streams = [calls.start(**ask) for ask in asks]
        await split.until(lambda: split.metrics().total("epicycle_requests_running") > 0, "the load")
        if pause % 2:
            await split.until(partial(has_token, streams), "a token")
        await asyncio.gather(*(stream.leave() for stream in streams))
        await assert_empty(split)


async def test_requests_outlive_the_executor_that_computes_their_prompts(split: LiveServer, calls: Calls) -> None:
    asks = long_prompts(6, max_tokens=8)
    expected = await answers(split, asks, cache_salt="whole")
    asking = [asyncio.create_task(calls.complete(**ask, cache_salt="cut")) for ask in asks]
    await split.until(partial(computes_prompts, split), "a prompt under way")
    os.kill(split.pids()["ex0"], signal.SIGKILL)
    told = await asyncio.gather(*asking)
    assert [200] * 6 == [answer.status for answer in told]
    assert [answer.choice for answer in expected] == [answer.choice for answer in told]
    await split.until(lambda: split.health()["status"] == "healthy" or None, "both roles")
    before = (await split.settled()).total("epicycle_transfers_total")
    assert [answer.choice for answer in expected] == [
        answer.choice for answer in await answers(split, asks, cache_salt="again")
    ]
    assert 6 == (await split.settled()).total("epicycle_transfers_total") - before
    await assert_empty(split)


async def test_the_death_of_the_decoding_executor_ends_its_requests_soon(split: LiveServer, calls: Calls) -> None:
    asks = long_prompts(6, max_tokens=400)
    streams = [calls.start(**ask, cache_salt="dead") for ask in asks]
    await split.until(partial(computes_prompts, split), "a prompt under way")
    prefill = split.pids()["ex0"]
    os.kill(split.pids()["ex1"], signal.SIGKILL)
    killed_s = time.monotonic()
    told = await asyncio.gather(*(stream.task for stream in streams))
    assert {"engine_lost"} == {answer.error.get("code") for answer in told}
    print(f"{len(told)} requests ended {time.monotonic() - killed_s:.3f} s after the kill")
    await split.until(lambda: split.health()["status"] == "healthy" or None, "both roles")
    assert prefill == split.pids()["ex0"], "the other role keeps its weights"
    assert [200] * 4 == [answer.status for answer in await answers(split, prompts(4), cache_salt="after")]
    await assert_empty(split)


async def test_both_roles_outlive_control(split: LiveServer, calls: Calls) -> None:
    before = split.pids()
    streams = [calls.start(**ask, cache_salt="control") for ask in long_prompts(6, max_tokens=400)]
    await split.until(partial(computes_prompts, split), "a prompt under way")
    os.kill(before["control"], signal.SIGKILL)
    told = await asyncio.gather(*(stream.task for stream in streams))
    assert {"engine_lost"} == {answer.error.get("code") for answer in told}
    await split.until(lambda: split.health()["status"] == "healthy" or None, "service")
    assert [before[name] for name in ("ex0", "ex1")] == [split.pids()[name] for name in ("ex0", "ex1")]
    asks = prompts(4)
    first, again = [await answers(split, asks, cache_salt=salt) for salt in ("one", "two")]
    assert [200] * 4 == [answer.status for answer in first]
    assert [answer.choice for answer in first] == [answer.choice for answer in again]
    await assert_empty(split)


async def test_nothing_is_left_when_a_split_ends() -> None:
    before = own_shared_memory()
    with live_server("processes", *SAME, *SPLIT) as server:
        assert [200] * 4 == [answer.status for answer in await answers(server, prompts(4))]
        pids = server.pids()
        os.kill(pids["ex0"], signal.SIGKILL)
        await server.until(lambda: server.health()["status"] == "healthy" or None, "both roles")
        pids |= {f"{name} again": pid for name, pid in server.pids().items()}
    assert [] == [name for name, pid in pids.items() if is_alive(pid)]
    assert set() == own_shared_memory() - before
