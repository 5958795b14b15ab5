"""A crowd of unlike requests shares every tick, and each gets what it would have got alone, to the last bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.live.calls import Answer, Calls, Choice
from tests.e2e.live.server import LiveServer, Metrics

LOOPS = 4
CHUNK = 64
COUNT = 32
PROMPTS = ("Once upon a time", "The old ship sailed", "One day, Tom and his dog", "She opened the box and")
THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 1.0)
BOUNDS = ((1, 4), (2, 3), (1, 4), (3, 4), (1, 2), (2, 4), (4, 4))


def asked(number: int) -> dict[str, Any]:
    least, most = BOUNDS[number % len(BOUNDS)]
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 7 + number % 4,
        "temperature": 0.0 if number % 3 == 0 else 0.9,
        "top_p": 0.95,
        "seed": number,
        "exit_threshold": THRESHOLDS[number % len(THRESHOLDS)],
        "min_loops": least,
        "max_loops": most,
        "logprobs": 2,
        "ignore_eos": True,
        "stream": True,
    }


def grown(name: str, before: Metrics, after: Metrics) -> float:
    return after.total(name) - before.total(name)


@pytest.fixture(scope="session")
def alone() -> dict[int, Choice]:
    """Replies to requests that had the server to themselves, made once: all topologies must agree on them."""
    return {}


async def serve_alone(calls: Calls, alone: dict[int, Choice]) -> None:
    for number in range(COUNT):
        if number not in alone:
            alone[number] = (await calls.complete(**asked(number))).choice


def check_bounds(number: int, choice: Choice) -> None:
    body = asked(number)
    assert LOOPS == choice.exit_depths[0]
    assert all(body["min_loops"] <= depth <= body["max_loops"] for depth in choice.exit_depths[1:])
    if body["exit_threshold"] == 1.0:
        assert {body["max_loops"]} == set(choice.exit_depths[1:])


@pytest.mark.timeout(600)
async def test_every_reply_of_a_crowd_equals_its_solo_reply(
    live: LiveServer, calls: Calls, alone: dict[int, Choice]
) -> None:
    await serve_alone(calls, alone)
    before = await live.settled()
    crowd: list[Answer] = await asyncio.gather(*(calls.complete(**asked(number)) for number in range(COUNT)))
    after = await live.settled()

    for number, answer in enumerate(crowd):
        assert (200, 1, alone[number]) == (answer.status, answer.terminals, answer.choice), number
        assert asked(number)["max_tokens"] == len(answer.choice.logprobs) == len(answer.choice.token_ids)
        check_bounds(number, answer.choice)
    assert 0 == after['epicycle_kv_pages{state="live"}']
    idle = [after[f'epicycle_kv_pages{{state="{state}"}}'] for state in ("free", "prefix")]
    assert after.total("epicycle_kv_pages") == sum(idle)
    ticks = grown("epicycle_ticks_total", before, after)
    assert 6 * ticks <= grown('epicycle_core_row_loops_total{kind="decode"}', before, after)
    assert ticks < 2 * grown("epicycle_mixed_depth_ticks_total", before, after)


async def test_streams_run_on_between_the_chunks_of_a_long_prompt(live: LiveServer, calls: Calls) -> None:
    ids = (await calls.post("/tokenize", prompt=" ".join(PROMPTS) * 60))["tokens"][:800]
    before = await live.settled()
    body = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0.9, "ignore_eos": True}
    runners = [calls.start(**body, exit_threshold=1.0, max_loops=2, seed=seed) for seed in range(4)]
    try:
        await live.until(lambda: all(runner.tokens for runner in runners), "running streams")
        started = [runner.tokens for runner in runners]
        (first,) = [event async for event in calls.events(prompt=ids, max_tokens=1, return_token_ids=True)]
        emitted = [runner.tokens - start for runner, start in zip(runners, started, strict=True)]
    finally:
        for runner in runners:
            await runner.leave()
    after = await live.settled()

    assert ids == first["choices"][0]["prompt_token_ids"]
    # A chunk walks the loops one tick each, and two ticks make a token of a runner. Half of those may still be on
    # their way to the client.
    ticks = -(-len(ids) // CHUNK) * LOOPS
    assert all(ticks // 4 <= tokens for tokens in emitted), (ticks, emitted)
    cached = grown("epicycle_prefix_hit_tokens_total", before, after)
    prompts = len(ids) + 4 * len(runners) - cached
    assert LOOPS * prompts == grown('epicycle_core_row_loops_total{kind="prompt"}', before, after)
    assert 0 == after['epicycle_kv_pages{state="live"}']
