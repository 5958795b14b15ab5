"""Two real executors behind one admission: equal answers from both, conversations that stay, and the death of one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer, live_server

pytestmark = pytest.mark.slow

FLAGS = ("--replicas", "cpu,cpu", "--slots", "4", "--prompt-chunk", "64")
NAMES = ("ex0", "ex1")


@pytest.fixture(scope="module")
def replicas() -> Iterator[LiveServer]:
    with live_server("processes", *FLAGS) as server:
        yield server


@pytest.fixture
async def calls(replicas: LiveServer) -> AsyncIterator[Calls]:
    def are_up() -> bool:
        metrics = replicas.metrics()
        return all(metrics[f'epicycle_kv_pages{{executor="{name}",state="free"}}'] > 0 for name in NAMES)

    await replicas.until(are_up, "both: a server answers as soon as one is up")
    async with Calls(replicas.base_url) as calls:
        yield calls


async def test_both_say_the_same_whoever_is_asked(replicas: LiveServer, calls: Calls) -> None:
    asked = {"prompt": "The cat sat on the", "max_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": 2}
    answers = await asyncio.gather(*(calls.complete(**asked, cache_salt=str(n)) for n in range(8)))
    assert [answers[0].choice] * 8 == [answer.choice for answer in answers]
    metrics = await replicas.settled()
    made = {name: metrics[f'epicycle_generation_tokens_total{{executor="{name}"}}'] for name in NAMES}
    tokens = len(answers[0].choice.token_ids)
    assert dict.fromkeys(NAMES, 4 * tokens) == made


async def test_a_conversation_stays_where_its_turns_are_cached(replicas: LiveServer, calls: Calls) -> None:
    asked = {"max_tokens": 8, "temperature": 0, "session_id": "talk", "cache_salt": "talk"}
    turns = [{"role": "user", "content": "Please tell me what a garden is, and what grows in it, in a few words."}]
    for said in ("And what is a tree?", "And what is a bird?"):
        answer = await calls.chat(turns, **asked)
        turns += [{"role": "assistant", "content": answer.choice.text}, {"role": "user", "content": said}]
    last = await calls.chat(turns, **asked)
    assert int(last.usage["prompt_tokens_details"]["cached_tokens"]) > 16
    metrics = await replicas.settled()
    pinned = [metrics[f'epicycle_session_pinned_pages{{executor="{name}"}}'] for name in NAMES]
    assert 1 == sum(pages > 0 for pages in pinned), pinned


async def test_the_death_of_one_costs_only_its_requests(replicas: LiveServer, calls: Calls) -> None:
    long = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "exit_threshold": 1.0}
    streams = [calls.start(**long, cache_salt=f"kill{n}") for n in range(6)]
    await replicas.until(lambda: all(stream.tokens for stream in streams), "tokens of every stream")
    os.kill(replicas.pids()["ex1"], signal.SIGKILL)
    answers = await asyncio.gather(*(stream.task for stream in streams))
    ends = Counter(answer.error.get("code", "done") for answer in answers)
    assert Counter({"done": 3, "engine_lost": 3}) == ends
    assert {300} == {len(answer.choice.token_ids) for answer in answers if not answer.error}
    await replicas.until(lambda: replicas.health()["status"] == "healthy" or None, "both replicas")
    metrics = await replicas.settled()
    assert 0 == metrics.total("epicycle_uneven_census_total")
    assert [0, 0] == [metrics[f'epicycle_kv_pages{{executor="{name}",state="live"}}'] for name in NAMES]
