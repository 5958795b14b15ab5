"""A conversation continues from the cache, and says what it would have said from the start."""

from __future__ import annotations

from typing import Any

from tests.e2e.live.calls import Answer, Calls
from tests.e2e.live.server import LiveServer

LOOPS = 4
OPENING = "What is 2 plus 3? Please think about it for a while, and then tell me the number and nothing else."


def cached(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_conversation_continues_from_its_cached_turns(live: LiveServer, calls: Calls) -> None:
    before = await live.settled()
    asked: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
        "cache_salt": "talk",
        "session_id": "talk",
    }
    first = await calls.chat(OPENING, **asked)
    turns = [
        {"role": "user", "content": OPENING},
        {"role": "assistant", "content": first.choice.text},
        {"role": "user", "content": "And 4 plus 4?"},
    ]
    second = await calls.chat(turns, **asked)
    cold = await calls.chat(turns, **(asked | {"cache_salt": "alone"}))
    after = await live.settled()

    assert cold.choice == second.choice
    assert (0, 0) == (cached(first), cached(cold))
    assert 16 <= cached(second) < first.usage["prompt_tokens"] + 1
    prompts = sum(answer.usage["prompt_tokens"] for answer in (first, second, cold))
    name = 'epicycle_core_row_loops_total{kind="prompt"}'
    assert LOOPS * (prompts - cached(second)) == after[name] - before[name]


async def test_a_repeat_of_whole_pages_starts_at_the_head(live: LiveServer, calls: Calls) -> None:
    asked: dict[str, Any] = {"prompt": list(range(40, 72)), "max_tokens": 9, "temperature": 0.9, "seed": 3}
    name = 'epicycle_core_row_loops_total{kind="prompt"}'
    cold = await calls.complete(**asked, cache_salt="other")
    await calls.complete(**asked, cache_salt="head")
    before = await live.settled()
    again = await calls.complete(**asked, cache_salt="head")
    after = await live.settled()
    assert 32 == cached(again)
    assert 0 == after[name] - before[name]
    assert cold.choice == again.choice
