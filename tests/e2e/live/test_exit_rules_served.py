"""Servers with other exit rules than the model's own: depths keep to their bounds and vary as the rule can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

LOOPS = 4
STORY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
# rule -> a minimum of loops, and the shallowest exit that it leaves: the delayed gate acts a loop after the minimum
BOUNDS = {"lookahead": (3, 3), "ouro_delayed": (2, 3), "random_lookahead": (3, 3)}
EARLIEST = 2  # of every rule that plans a loop ahead


@pytest.fixture(scope="module", params=[*BOUNDS, "fixed"])
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(rule: str, first_topology: str) -> Iterator[LiveServer]:
    with live_server(first_topology, "--exit-rule", rule, "--slots", "8") as server:
        yield server


@pytest.fixture
async def served(server: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(server.base_url) as calls:
        yield calls


async def depths(served: Calls, **body: Any) -> list[int]:
    answer = await served.complete(**STORY, **body)
    assert 200 == answer.status, answer.error
    return answer.choice.exit_depths


async def test_depths_keep_to_what_was_asked(served: Calls, rule: str) -> None:
    (model,) = (await served.get("/v1/models"))["data"]
    assert (rule, rule != "fixed") == (model["exit_rule"], model["can_exit_early"])
    assert [LOOPS] * 16 == await depths(served, exit_threshold=1.0)
    assert [LOOPS, *[2] * 15] == await depths(served, exit_threshold=1.0, max_loops=2)
    if rule == "fixed":
        refused = await served.complete(**STORY, exit_threshold=0.9)
        assert (400, "exit_threshold") == (refused.status, refused.error["param"])
        assert "engine.exit_rule" in refused.error["message"]
        return
    free = await depths(served, exit_threshold=0.4, min_loops=1)
    assert LOOPS == free[0]
    assert set(free[1:]) <= set(range(EARLIEST, LOOPS + 1))
    assert sum(free) < LOOPS * len(free)
    assert free == await depths(served, exit_threshold=0.4, min_loops=1)
    least, shallowest = BOUNDS[rule]
    bound = await depths(served, exit_threshold=0.4, min_loops=least)
    assert set(bound[1:]) <= set(range(shallowest, LOOPS + 1))
    assert shallowest in bound
