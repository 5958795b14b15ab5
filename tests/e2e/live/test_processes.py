"""What runs where: the processes that health names, the one that has torch, and the end of one under load."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.live.calls import Answer, Calls
from tests.e2e.live.server import LiveServer

NAMES = ["control", "ex0", "gw0", "supervisor"]
STREAMS = 6


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def test_health_names_live_pids_and_only_the_executor_has_torch(live: LiveServer, topology: str) -> None:
    report = await asyncio.to_thread(live.health)
    pids = {actor["name"]: actor["pid"] for actor in report["actors"]}

    assert ("healthy", [], NAMES) == (report["status"], report["problems"], sorted(pids))
    assert {"ready"} == {actor["state"] for actor in report["actors"]}
    assert live.pids() == pids
    if topology == "single-process":
        assert 1 == len(set(pids.values()))
        assert maps_torch(pids["ex0"])
    else:
        assert 4 == len(set(pids.values()))
        assert {"ex0"} == {name for name, pid in pids.items() if maps_torch(pid)}


async def test_a_killed_executor_ends_each_request_once_and_comes_back(
    live: LiveServer, topology: str, calls: Calls
) -> None:
    if topology == "single-process":
        pytest.skip("there is no process to kill")
    short = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    expected = await calls.complete(**short)
    long = {"prompt": "Once upon a time", "max_tokens": 800, "ignore_eos": True, "exit_threshold": 1.0}
    streams = [calls.start(**long) for _ in range(STREAMS)]
    whole = asyncio.create_task(calls.complete(**long))
    await live.until(lambda: live.metrics()["epicycle_requests_running"] == STREAMS + 1, "load")
    await live.until(lambda: all(stream.tokens for stream in streams), "tokens of every stream")
    os.kill(live.pids()["ex0"], signal.SIGKILL)

    for answer in await asyncio.gather(*(stream.task for stream in streams)):
        assert (200, 1, "engine_lost") == (answer.status, answer.terminals, answer.error["code"])
        assert 0 < len(answer.choice.token_ids) == len(answer.choice.exit_depths) < 800
    lost = await whole
    assert (503, "engine_lost") == (lost.status, lost.error["code"])

    async def served() -> Answer | None:
        answer = await calls.complete(**short)
        return answer if answer.status == 200 else None

    again = await live.until_async(served, "service after the kill")
    assert expected.choice == again.choice
    assert 0 == (await live.settled())['epicycle_kv_pages{state="live"}']
