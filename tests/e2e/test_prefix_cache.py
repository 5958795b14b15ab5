"""The prefix cache as clients see it: what usage says, which fields steer it, and how an operator empties it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.client import Answer, Client
from tests.fakes.stack import Stack

PAGE = 16
PROMPT = list(range(20, 60))  # two full pages and a half


def cached(answer: Answer) -> int:
    assert 200 == answer.status, answer.body
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def ask(client: Client, prompt: Any = PROMPT, **fields: Any) -> int:
    return cached(await client.complete(prompt, max_tokens=3, **fields))


async def test_usage_counts_the_prompt_tokens_that_were_cached(client: Client, request: pytest.FixtureRequest) -> None:
    salt = request.node.name
    assert [0, 32, 32] == [await ask(client, PROMPT[:end], cache_salt=salt) for end in (40, 40, 33)]
    assert 31 == await ask(client, PROMPT[:32], cache_salt=salt), "the last token is always computed"
    assert 16 + 32 == await ask(client, [PROMPT[:20], PROMPT], cache_salt=salt)
    assert 32 == await ask(client, n=3, cache_salt=salt), "a prompt counts once, whatever n is"


async def test_a_stream_says_so_in_its_usage_and_at_a_stop_string(client: Client) -> None:
    text = (await client.complete(PROMPT, max_tokens=6)).choice["text"]
    stream = await client.complete(
        PROMPT, max_tokens=6, stream=True, stream_options={"include_usage": True}, stop=text[2:4]
    )
    assert {"cached_tokens": 32} == stream.events[-1]["usage"]["prompt_tokens_details"]


async def test_replies_do_not_depend_on_the_cache(client: Client) -> None:
    fields = {"max_tokens": 20, "logprobs": 2, "cache_salt": "equal"}
    cold, warm = [(await client.complete(PROMPT, **fields)).json for _ in range(2)]
    assert (0, 32) == tuple(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm))
    assert cold["choices"] == warm["choices"]


async def test_salts_are_strangers(client: Client) -> None:
    assert [0, 0, 32] == [await ask(client, cache_salt=salt) for salt in ("tenant 1", "tenant 2", "tenant 1")]


async def test_chats_share_what_their_templates_begin_with(client: Client) -> None:
    long = [{"role": "user", "content": "tell me a long story about ships and the sea " * 3}]
    first = await client.chat(long, max_tokens=3, cache_salt="chat")
    turns = [*long, {"role": "assistant", "content": "aye"}, {"role": "user", "content": "go on"}]
    second = await client.chat(turns, max_tokens=3, cache_salt="chat")
    assert (0, True) == (cached(first), cached(second) >= PAGE)
    assert cached(second) <= first.json["usage"]["prompt_tokens"]


async def test_prompt_logprobs_come_for_every_token_of_a_cached_prompt(client: Client) -> None:
    await ask(client)
    answer = await client.complete(PROMPT, max_tokens=1, echo=True, logprobs=1)
    assert 0 == cached(answer)
    assert 41 == len(answer.choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("field", ["cache_salt", "session_id"])
async def test_labels_that_are_too_long_are_refused(client: Client, field: str) -> None:
    answer = await client.complete(**{field: "x" * 2000})
    assert (400, field) == (answer.status, answer.error["param"])


async def test_an_operator_empties_the_cache(stack: Stack) -> None:
    async with Client(stack.base_url) as client:
        assert [0, 32] == [await ask(client, session_id="mine"), await ask(client, session_id="mine")]
        metrics = (await client.get("/metrics")).body.decode()
        assert 'epicycle_kv_pages{state="prefix"} 2.0' in metrics
        assert "epicycle_session_pinned_pages 2.0" in metrics
        assert "epicycle_prefix_query_tokens_total 80.0" in metrics
        assert "epicycle_prefix_hit_tokens_total 32.0" in metrics
        assert {"freed_pages": 2} == (await client.post("/cache/reset")).json
        assert {"freed_pages": 0} == (await client.post("/cache/reset")).json
        assert 0 == await ask(client)


async def test_reset_is_a_post_and_needs_control(stack: Stack) -> None:
    async with Client(stack.base_url) as client:
        assert 405 == (await client.get("/cache/reset")).status
        stack.lose_control()
        answer = await client.post("/cache/reset")
        assert (503, "not_ready") == (answer.status, json.loads(answer.body)["error"]["code"])
