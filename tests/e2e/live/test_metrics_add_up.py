"""/metrics counts exactly the work that the replies tell of: loops, tokens, what early exit saved."""

from __future__ import annotations

import asyncio

from tests.e2e.live.calls import Answer, Calls
from tests.e2e.live.server import LiveServer, Metrics

LOOPS = 4
STORY = "Once upon a time, there was a little"


async def mixed_batch(calls: Calls) -> list[Answer]:
    """Streams, choices, lists, chats and scoring at once. No stop strings: they leave an overrun nobody is told of."""
    sampled = {"temperature": 0.9, "exit_threshold": 0.5, "max_tokens": 9}
    return await asyncio.gather(
        calls.complete(prompt=STORY, n=3, seed=1, **sampled),
        calls.complete(prompt=STORY, n=2, seed=2, stream=True, **sampled),
        calls.complete(prompt=[STORY, "The old ship"], seed=3, min_loops=2, **sampled),
        calls.complete(prompt=[5, 6, 7, 8], max_tokens=7, exit_threshold=1.0, ignore_eos=True),
        calls.complete(prompt=STORY, echo=True, logprobs=1, max_tokens=0),
        calls.chat("What is 2 plus 3?", max_tokens=20, temperature=0),
        calls.chat("Who are you?", max_tokens=8, max_loops=2, stream=True, stream_options={"include_usage": True}),
    )


def grown(name: str, before: Metrics, after: Metrics) -> float:
    return after.total(name) - before.total(name)


async def test_loops_and_tokens_of_a_mixed_batch(live: LiveServer, calls: Calls) -> None:
    before = await live.settled()
    answers = await mixed_batch(calls)
    after = await live.settled()
    assert {200} == {answer.status for answer in answers}

    choices = [choice for answer in answers for choice in answer.choices]
    decoded = [depth for choice in choices for depth in choice.exit_depths[1:]]
    prompts = sum(len(choice.prompt_token_ids) for choice in choices)
    row_loops = {kind: f'epicycle_core_row_loops_total{{kind="{kind}"}}' for kind in ("decode", "prompt")}

    assert sum(decoded) == grown(row_loops["decode"], before, after)
    cached = grown("epicycle_prefix_hit_tokens_total", before, after)
    told = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers if answer.usage]
    assert sum(told) <= cached <= grown("epicycle_prefix_query_tokens_total", before, after) < prompts
    assert LOOPS * (prompts - cached) == grown(row_loops["prompt"], before, after)
    assert sum(LOOPS - depth for depth in decoded) == grown("epicycle_loops_saved_total", before, after)
    assert grown("epicycle_core_row_loops_total", before, after) == grown("epicycle_rows_in_ticks_total", before, after)
    assert prompts == grown("epicycle_prompt_tokens_total", before, after)
    tokens = sum(len(choice.token_ids) for choice in choices)
    assert tokens == grown("epicycle_generation_tokens_total", before, after)
    assert tokens == grown("epicycle_loops_per_token_count", before, after)
    assert len(choices) == grown("epicycle_requests_finished_total", before, after)
    assert 0 == grown("epicycle_starved_total", before, after)


async def test_usage_says_what_the_choices_say(live: LiveServer, calls: Calls) -> None:
    for answer in await mixed_batch(calls):
        if answer.usage:  # a stream that did not ask has none
            assert sum(len(choice.token_ids) for choice in answer.choices) == answer.usage["completion_tokens"]
            assert sum(sum(choice.exit_depths) for choice in answer.choices) == answer.usage["loops"]
