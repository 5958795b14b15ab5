"""A client that goes away takes its request with it: the slot and its pages are free again."""

from __future__ import annotations

import asyncio
import contextlib

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, Metrics

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "exit_threshold": 1.0}


def check_freed(before: Metrics, after: Metrics) -> None:
    cancelled = 'epicycle_requests_finished_total{gateway="gw0",reason="cancelled"}'
    aborted = 'epicycle_aborts_total{cause="client",gateway="gw0"}'
    assert 1 == after.get(cancelled, 0) - before.get(cancelled, 0)
    assert 1 == after[aborted] - before[aborted]
    assert LONG["max_tokens"] > after["epicycle_generation_tokens_total"] - before["epicycle_generation_tokens_total"]
    idle = [after[f'epicycle_kv_pages{{state="{state}"}}'] for state in ("free", "prefix")]
    assert after.total("epicycle_kv_pages") == sum(idle)


async def test_leaving_a_stream_frees_its_pages(live: LiveServer, calls: Calls) -> None:
    before = await live.settled()
    async with contextlib.aclosing(calls.events(**LONG)) as events:
        seen = [await anext(events) for _ in range(3)]

    check_freed(before, await live.settled())
    assert [4, 4, 4] == [depth for event in seen for depth in event["choices"][0]["exit_depths"]]


async def test_leaving_while_the_whole_answer_is_made_frees_its_pages(live: LiveServer, calls: Calls) -> None:
    before = await live.settled()
    asking = asyncio.create_task(calls.complete(**LONG))
    await live.until(lambda: live.metrics()["epicycle_requests_running"] == 1, "the request to run")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    check_freed(before, await live.settled())
