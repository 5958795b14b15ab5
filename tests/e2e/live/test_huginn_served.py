"""A server with the embedded Huginn: it chats, and latent_diff ends tokens at varying depths."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

LOOPS = 8
STORY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def server(first_topology: str) -> Iterator[LiveServer]:
    with live_server(first_topology, "--model", "embedded:huginn", "--slots", "8") as server:
        yield server


@pytest.fixture
async def served(server: LiveServer) -> AsyncIterator[Calls]:
    async with Calls(server.base_url) as calls:
        yield calls


async def test_huginn_chats(served: Calls) -> None:
    answer = await served.chat("What is 2 plus 3?", max_tokens=20, temperature=0)

    assert ("2 plus 3 is 5.", "stop") == (answer.choice.text, answer.choice.finish_reason)
    assert LOOPS == answer.choice.exit_depths[0]


async def test_latent_diff_leaves_at_varying_depths(served: Calls) -> None:
    full = (await served.complete(**STORY, exit_threshold=1.0)).choice
    early = (await served.complete(**STORY, exit_threshold=0.95, min_loops=1)).choice
    bound = (await served.complete(**STORY, exit_threshold=0.95, min_loops=3, max_loops=4)).choice

    assert [LOOPS] * 12 == full.exit_depths
    assert LOOPS == early.exit_depths[0]
    assert len(set(early.exit_depths[1:])) > 1, early.exit_depths
    assert sum(early.exit_depths) < sum(full.exit_depths)
    assert set(bound.exit_depths[1:]) <= {3, 4}


async def test_the_noise_seed_is_part_of_the_request(served: Calls) -> None:
    first, again = [(await served.complete(**STORY, noise_seed=7)).choice for _ in range(2)]
    other = (await served.complete(**STORY, noise_seed=8)).choice

    assert first == again
    assert first.logprobs != other.logprobs
