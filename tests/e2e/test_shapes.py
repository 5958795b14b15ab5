"""The shapes that stock clients rely on, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import Client


def joined(events: list[Any], key: str, index: int = 0) -> list[Any]:
    """A per-token list of one choice, put together from its events as clients do."""
    return [item for event in events for choice in event["choices"] if choice["index"] == index for item in choice[key]]


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"]["content"] if "delta" in choice else choice["text"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


async def test_completion_has_the_fields_of_a_text_completion(client: Client) -> None:
    answer = (await client.complete(max_tokens=5, return_token_ids=True)).json
    assert {"id", "object", "created", "model", "choices", "usage"} == set(answer)
    assert ("text_completion", "ouro-tiny") == (answer["object"], answer["model"])
    choice = answer["choices"][0]
    assert (0, "length", None, None) == tuple(
        choice[key] for key in ("index", "finish_reason", "stop_reason", "logprobs")
    )
    assert 5 == len(choice["token_ids"]) == len(choice["exit_depths"]) == len(choice["text"])
    assert [261, 2982] == choice["prompt_token_ids"]
    usage = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "loops": sum(choice["exit_depths"])}
    assert usage | {"prompt_tokens_details": {"cached_tokens": 0}} == answer["usage"]


async def test_chat_has_the_fields_of_a_chat_completion(client: Client) -> None:
    answer = (await client.chat(max_tokens=3)).json
    assert "chat.completion" == answer["object"]
    message = answer["choices"][0]["message"]
    assert ("assistant", 3) == (message["role"], len(message["content"]))
    assert 3 == len(answer["choices"][0]["exit_depths"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_stream_says_what_the_answer_says(client: Client, kind: str) -> None:
    ask = client.chat if kind == "chat" else client.complete
    whole = (await ask(max_tokens=7, return_token_ids=True)).json["choices"][0]
    stream = await ask(max_tokens=7, return_token_ids=True, stream=True)
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.is_done
    events = stream.events
    assert 7 == len(events)
    assert [None] * 6 + ["length"] == [event["choices"][0]["finish_reason"] for event in events]
    text = whole["message"]["content"] if kind == "chat" else whole["text"]
    assert text == text_of(events)
    for key in ("exit_depths", "token_ids"):
        assert whole[key] == joined(events, key)
    assert whole["prompt_token_ids"] == events[0]["choices"][0]["prompt_token_ids"]
    assert all("usage" not in event for event in events)


async def test_first_chat_delta_names_the_role_and_depths_stay_beside_delta(client: Client) -> None:
    events = (await client.chat(max_tokens=3, stream=True)).events
    assert ["assistant", None, None] == [event["choices"][0]["delta"].get("role") for event in events]
    assert all({"content"} >= set(event["choices"][0]["delta"]) - {"role"} for event in events)
    assert all("exit_depths" in event["choices"][0] for event in events)


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_usage_is_an_extra_last_chunk_when_asked_for(client: Client, kind: str) -> None:
    ask = client.chat if kind == "chat" else client.complete
    stream = await ask(max_tokens=4, stream=True, stream_options={"include_usage": True})
    *tokens, last = stream.events
    assert [] == last["choices"]
    assert 4 == last["usage"]["completion_tokens"]
    assert sum(joined(tokens, "exit_depths")) == last["usage"]["loops"]
    assert [None] * 4 == [event["usage"] for event in tokens]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_choices_of_several_prompts_keep_their_index(client: Client, is_stream: bool) -> None:
    prompts = ["hello", "good day"]
    answer = await client.complete(prompts, n=2, max_tokens=3, stream=is_stream, return_token_ids=True)
    alone = [(await client.complete(prompt, max_tokens=3)).choice["text"] for prompt in prompts]
    if is_stream:
        texts = [text_of(answer.events, index) for index in range(4)]
        ends = [c["index"] for event in answer.events for c in event["choices"] if c["finish_reason"]]
        assert [0, 1, 2, 3] == sorted(ends)
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
        assert [0, 1, 2, 3] == [choice["index"] for choice in answer.json["choices"]]
    assert [alone[0], alone[0], alone[1], alone[1]] == texts


@pytest.mark.parametrize("prompt", [[261, 2982], [[261, 2982]], ["hello"], "hello"])
async def test_prompt_comes_in_four_forms(client: Client, prompt: Any) -> None:
    expected = (await client.complete("hello", max_tokens=4)).choice["text"]
    assert expected == (await client.complete(prompt, max_tokens=4)).choice["text"]


async def test_absent_and_null_max_tokens_are_sixteen(client: Client) -> None:
    assert 16 == (await client.complete()).json["usage"]["completion_tokens"]
    assert 16 == (await client.complete(max_tokens=None)).json["usage"]["completion_tokens"]


async def test_chat_without_a_limit_uses_the_rest_of_the_context(client: Client) -> None:
    usage = (await client.chat(ignore_eos=True)).json["usage"]
    context = (await client.get("/v1/models/ouro-tiny")).json["context_length"]
    assert context == usage["total_tokens"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_with_logprobs_and_no_tokens_scores_the_prompt(client: Client, is_stream: bool) -> None:
    answer = await client.complete("hello there", echo=True, logprobs=1, max_tokens=0, stream=is_stream)
    choice = answer.events[0]["choices"][0] if is_stream else answer.choice
    assert "hello there" == choice["text"]
    scores = choice["logprobs"]
    assert "hello there" == "".join(scores["tokens"])
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(score < 0 for score in scores["token_logprobs"][1:])
    assert [] == choice["exit_depths"]
    assert "length" == choice["finish_reason"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_completion_logprobs_are_aligned_with_the_text(client: Client, is_stream: bool) -> None:
    answer = await client.complete("hello", echo=True, logprobs=2, max_tokens=4, stream=is_stream)
    if is_stream:
        parts = [event["choices"][0] for event in answer.events]
        text = "".join(part["text"] for part in parts)
        scores = {key: [x for part in parts for x in part["logprobs"][key]] for key in parts[0]["logprobs"]}
    else:
        text, scores = answer.choice["text"], answer.choice["logprobs"]
    ends = [*scores["text_offset"][1:], len(text)]
    assert scores["tokens"] == [text[start:end] for start, end in zip(scores["text_offset"], ends, strict=True)]
    assert 6 == len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"])
    assert all(token in top for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True))


async def test_chat_logprobs_are_entries_with_bytes(client: Client) -> None:
    choice = (await client.chat(max_tokens=2, logprobs=True, top_logprobs=2)).choice
    entries = choice["logprobs"]["content"]
    assert 2 == len(entries)
    for entry, letter in zip(entries, choice["message"]["content"], strict=True):
        assert (letter, list(letter.encode())) == (entry["token"], entry["bytes"])
        assert 2 == len(entry["top_logprobs"])
        assert {"token", "logprob", "bytes"} == set(entry["top_logprobs"][0])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_stop_string_cuts_text_and_lists_alike(client: Client, is_stream: bool, n: int) -> None:
    full = (await client.complete(max_tokens=30, seed=1)).choice["text"]
    stop = full[6:9]
    cut = full.index(stop)
    answer = await client.complete(
        max_tokens=30, seed=1, n=n, stop=["no such text", stop], stream=is_stream, return_token_ids=True
    )
    for index in range(n):
        if is_stream:
            choices = [c for event in answer.events for c in event["choices"] if c["index"] == index]
            text, end = text_of(answer.events, index), choices[-1]
            ids, depths = joined(answer.events, "token_ids", index), joined(answer.events, "exit_depths", index)
        else:
            end = answer.json["choices"][index]
            text, ids, depths = end["text"], end["token_ids"], end["exit_depths"]
        assert full[:cut] == text
        assert ("stop", stop) == (end["finish_reason"], end["stop_reason"])
        assert cut + len(stop) == len(ids) == len(depths)


async def test_stop_token_is_counted_and_its_text_dropped(client: Client) -> None:
    whole = (await client.complete(max_tokens=12, return_token_ids=True)).choice
    stop_id = whole["token_ids"][4]
    at = whole["token_ids"].index(stop_id)
    choice = (await client.complete(max_tokens=12, stop_token_ids=[stop_id], return_token_ids=True)).choice
    assert ("stop", stop_id) == (choice["finish_reason"], choice["stop_reason"])
    assert whole["token_ids"][: at + 1] == choice["token_ids"]
    assert whole["text"][:at] == choice["text"]


async def test_loop_bounds_and_threshold_reach_the_executor(client: Client) -> None:
    depths = (await client.complete(max_tokens=8, min_loops=2, max_loops=3)).choice["exit_depths"]
    assert depths[0] == 4, "prompts run full depth"
    assert {2, 3} >= set(depths[1:])
    assert [4] * 8 == (await client.chat(max_tokens=8, exit_threshold=1.0)).choice["exit_depths"]


async def test_tokenize_and_back(client: Client) -> None:
    tokens = (await client.post("/tokenize", prompt="hello there")).json
    assert tokens["count"] == len(tokens["tokens"])
    assert {"prompt": "hello there"} == (await client.post("/v1/detokenize", tokens=tokens["tokens"])).json


async def test_models_report_limits_and_defaults(client: Client) -> None:
    card = (await client.get("/v1/models")).json["data"][0]
    assert (1024, 1024, 4) == (card["max_model_len"], card["context_length"], card["loops"])
    assert 0.0 == card["defaults"]["temperature"], "do_sample is false in the model's generation_config.json"
    assert (await client.get("/v1/models/ouro-tiny")).json == card
    assert "chat_template" in (await client.get("/tokenizer_info")).json
    version = (await client.get("/version")).json
    parts = {"version", "commit", "config", "host", "attention", "executors", "graphs", "kv_plan", "libraries"}
    assert parts == set(version)
    assert ["ex0"] == [executor["name"] for executor in version["executors"]]


async def test_probes_and_metrics_answer(client: Client) -> None:
    await client.complete(max_tokens=3)
    assert [200, 200, 200] == [(await client.get(path)).status for path in ("/livez", "/readyz", "/health")]
    assert await client.metric("epicycle_ticks_total") > 0
    for kind in ("decode", "prompt"):
        assert await client.metric(f'epicycle_core_row_loops_total{{kind="{kind}"}}') > 0
    assert 1 <= await client.metric('epicycle_requests_finished_total{gateway="gw0",reason="length"}')
    assert 0 == await client.metric("epicycle_requests_running")
    assert 0 == await client.metric("vllm:num_requests_running")
    assert await client.metric("epicycle_ticks_total") == await client.metric("epicycle_rows_per_tick_count")
    assert 3 <= await client.metric('epicycle_loops_per_token_count{gateway="gw0"}')
