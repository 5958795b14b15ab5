"""Known failures of such servers, by the ids of the project's case table: the symptom, and the right behaviour.

Each case ends with an ordinary request that must work. Cases covered by name elsewhere are not repeated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.e2e.client import CHAT, COMPLETIONS, HELLO, Client

Case = Callable[[Client], Awaitable[None]]
EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d \u05e9\u05dc\u05d5\u05dd e\u0301"


async def echoed_text_survives_streaming(client: Client) -> None:
    whole = (await client.complete(EMOJI, echo=True, max_tokens=2)).choice["text"]
    events = (await client.complete(EMOJI, echo=True, max_tokens=2, stream=True)).events
    assert whole == "".join(event["choices"][0]["text"] for event in events)
    assert whole.startswith(EMOJI)


async def stop_is_matched_on_text(client: Client) -> None:
    text = (await client.complete(max_tokens=20)).choice["text"]
    choice = (await client.complete(max_tokens=20, stop=text[3] + text[4])).choice
    assert (text[: text.index(text[3:5])], "stop") == (choice["text"], choice["finish_reason"])


async def stop_at_the_last_token_is_stop_not_length(client: Client) -> None:
    text = (await client.complete(max_tokens=6)).choice["text"]
    choice = (await client.complete(max_tokens=6, stop=text)).choice
    assert ("", "stop", text) == (choice["text"], choice["finish_reason"], choice["stop_reason"])


async def stop_frees_what_the_request_held(client: Client) -> None:
    text = (await client.complete(max_tokens=6)).choice["text"]
    await client.complete(max_tokens=900, ignore_eos=True, stop=text[2])
    await idle(client)


async def held_back_text_is_flushed_at_the_end(client: Client) -> None:
    text = (await client.complete(max_tokens=6)).choice["text"]
    for is_stream in (False, True):
        answer = await client.complete(max_tokens=6, stop=text[-1] + "never", stream=is_stream)
        whole = "".join(e["choices"][0]["text"] for e in answer.events) if is_stream else answer.choice["text"]
        assert text == whole


async def pad_id_inside_a_prompt_is_data(client: Client) -> None:
    assert 200 == (await client.complete([5, 0, 2, 6], max_tokens=1)).status


async def usage_chunk_has_no_choices_and_comes_only_when_asked(client: Client) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        plain = (await client.post(path, **fields, max_tokens=2, stream=True)).events
        assert all(event["choices"] for event in plain)
        asked = (
            await client.post(path, **fields, max_tokens=2, stream=True, stream_options={"include_usage": True})
        ).events
        assert [] == asked[-1]["choices"]
        assert asked[-1]["usage"]["total_tokens"] > 0


async def null_limits_are_defaults(client: Client) -> None:
    assert 16 == (await client.complete(max_tokens=None)).json["usage"]["completion_tokens"]
    assert 200 == (await client.chat(max_tokens=None, max_completion_tokens=None, n=None)).status


async def score_only(client: Client) -> None:
    choice = (await client.complete(max_tokens=0, echo=True, logprobs=0)).choice
    assert "hello" == choice["text"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 2


async def logprobs_have_the_shape_of_their_route(client: Client) -> None:
    lists = (await client.complete(max_tokens=1, logprobs=1)).choice["logprobs"]
    assert {"tokens", "token_logprobs", "top_logprobs", "text_offset"} == set(lists)
    assert ["content"] == list((await client.chat(max_tokens=1, logprobs=True)).choice["logprobs"])


async def ids_outside_the_vocabulary_are_refused(client: Client) -> None:
    for fields in ({"prompt": [-1]}, {"prompt": [1 << 40]}, {"prompt": "a", "stop_token_ids": [4096]}):
        assert 400 == (await client.post(COMPLETIONS, **fields)).status


async def hostile_sampling_is_refused(client: Client) -> None:
    for field, value in (("seed", 1 << 64), ("top_k", 1.5), ("top_p", 2.0), ("n", 5_000_000), ("logprobs", 10**9)):
        answer = await client.complete(**{field: value})
        assert (400, field) == (answer.status, answer.error["param"])
    assert 400 == (await client.post_raw(COMPLETIONS, b'{"prompt": "a", "temperature": NaN}')).status


async def empty_prompts_are_refused(client: Client) -> None:
    assert 400 == (await client.complete("")).status
    assert 400 == (await client.chat([])).status


async def surrogates_are_refused_on_all_routes(client: Client) -> None:
    assert 400 == (await client.post_raw(COMPLETIONS, b'{"prompt": "\\ud83d"}')).status
    assert 400 == (await client.post_raw(CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}')).status
    assert 400 == (await client.post_raw("/tokenize", b'{"prompt": "\\ud83d"}')).status


async def too_long_is_400_before_headers(client: Client) -> None:
    for is_stream in (False, True):
        answer = await client.complete([5] * 2000, max_tokens=1, stream=is_stream)
        assert (400, "context_length_exceeded") == (answer.status, answer.error["code"])


async def generation_up_to_the_context_is_length(client: Client) -> None:
    answer = await client.complete([5] * 1000, max_tokens=24, ignore_eos=True)
    assert ("length", 24) == (answer.choice["finish_reason"], answer.json["usage"]["completion_tokens"])


async def choices_carry_their_index(client: Client) -> None:
    events = (await client.complete(n=3, max_tokens=2, stream=True)).events
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert [0, 1, 2] == sorted(ends)


async def content_parts_are_joined_and_others_refused(client: Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = await client.chat([{"role": "user", "content": parts}], max_tokens=4)
    assert (await client.chat(max_tokens=4)).choice["message"] == joined.choice["message"]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert 400 == (await client.chat([{"role": "user", "content": image}])).status


async def streams_only_when_asked(client: Client) -> None:
    assert "application/json" in (await client.chat(max_tokens=1, stream=False)).headers["Content-Type"]


async def exit_threshold_saves_loops_and_shows_it(client: Client) -> None:
    early = (await client.complete(max_tokens=20, exit_threshold=0.5)).json
    full = (await client.complete(max_tokens=20, exit_threshold=1.0)).json
    assert early["usage"]["loops"] < full["usage"]["loops"] == 80
    assert await client.metric("epicycle_loops_saved_total") > 0


async def one_event_per_token(client: Client) -> None:
    assert 9 == len((await client.complete(max_tokens=9, stream=True)).events)


async def long_tokenizing_leaves_the_loop_alone(client: Client) -> None:
    big = asyncio.create_task(client.post("/tokenize", prompt="word " * 200_000))
    while not big.done():
        assert 200 == (await client.get("/livez")).status
    assert 200_000 <= (await big).json["count"]


async def context_length_is_published(client: Client) -> None:
    card = (await client.get("/v1/models")).json["data"][0]
    assert 0 < card["max_model_len"] == card["context_length"]


async def dashboards_find_vllm_names(client: Client) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert 0 == await client.metric(name)


async def foreign_origins_are_refused(client: Client) -> None:
    assert 403 == (await client.get("/v1/models", Origin="https://elsewhere")).status


async def idle(client: Client) -> None:
    """No slot and no page stays taken; bounded by the test's own timeout."""
    while await client.metric("epicycle_requests_running") or await client.metric("epicycle_kv_usage_ratio"):
        pass


CASES: dict[str, Case] = {
    "G01-G02-G05": echoed_text_survives_streaming,
    "L16-G08-G14": stop_is_matched_on_text,
    "G15-G17": stop_at_the_last_token_is_stop_not_length,
    "G16": stop_frees_what_the_request_held,
    "G06-G09": held_back_text_is_flushed_at_the_end,
    "L20": pad_id_inside_a_prompt_is_data,
    "G18-G19-G20-G21-G22": usage_chunk_has_no_choices_and_comes_only_when_asked,
    "G24-G26-G29": null_limits_are_defaults,
    "G27-G28-G31-G39": score_only,
    "G32-G33": logprobs_have_the_shape_of_their_route,
    "G43-G44-G47": ids_outside_the_vocabulary_are_refused,
    "G48-G50-G51-G52-G53-G54": hostile_sampling_is_refused,
    "G58": empty_prompts_are_refused,
    "G60-G61": surrogates_are_refused_on_all_routes,
    "L21-G62-G63-G64-G67-G71": too_long_is_400_before_headers,
    "G66": generation_up_to_the_context_is_length,
    "G79-G81": choices_carry_their_index,
    "G114-G115-G116": content_parts_are_joined_and_others_refused,
    "G159": streams_only_when_asked,
    "L07-L13": exit_threshold_saves_loops_and_shows_it,
    "G151": one_event_per_token,
    "G89-G90": long_tokenizing_leaves_the_loop_alone,
    "G128": context_length_is_published,
    "G131": dashboards_find_vllm_names,
    "G112": foreign_origins_are_refused,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_case(client: Client, case: Case) -> None:
    await case(client)
    answer: Any = await client.complete(max_tokens=1)
    assert 200 == answer.status
    await idle(client)
