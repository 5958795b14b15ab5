"""More requests than the pool holds: somebody waits on the host meanwhile, and everybody says what they say alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

POOL_BYTES = 18 << 20  # 23 pages of 16 tokens


@pytest.fixture(scope="module")
def server(first_topology: str) -> Iterator[LiveServer]:
    small = ("--slots", "3", "--context", "256", "--kv-memory", str(POOL_BYTES))
    steps = ("--set", "scheduler.grow_tokens=16", "--set", "scheduler.low_water_tokens=8")
    with live_server(first_topology, *small, *steps, "--poison") as server:
        yield server


def asked(number: int, salt: str) -> dict[str, Any]:
    """Ten pages in the end, of which the prompt has two."""
    return {
        "prompt": list(range(40 + number, 72 + number)),
        "max_tokens": 128,
        "ignore_eos": True,
        "temperature": (0.0, 0.9, 1.1)[number],
        "repetition_penalty": (1.0, 1.0, 1.2)[number],
        "exit_threshold": (1.0, 0.6, 0.8)[number],
        "seed": number,
        "cache_salt": salt,
    }


async def test_three_requests_that_need_30_pages_finish_in_23(server: LiveServer) -> None:
    async with Calls(server.base_url) as calls:
        alone = [await calls.complete(**asked(number, "alone")) for number in range(3)]
        assert 0 == server.metrics()["epicycle_preemptions_total"]
        together = await asyncio.gather(*(calls.complete(**asked(number, "together")) for number in range(3)))
    metrics = await server.settled()
    assert [answer.choice for answer in alone] == [answer.choice for answer in together]
    assert ["length"] * 3 == [answer.choice.finish_reason for answer in together]
    assert 1 <= metrics["epicycle_preemptions_total"] == metrics["epicycle_resumes_total"]
    assert 0 == metrics["epicycle_yielded_rows_total"] == metrics['epicycle_host_pages{state="saved"}']
