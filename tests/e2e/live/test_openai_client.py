"""The official `openai` package against the live server: what it sends is understood, what it gets it can read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import DEADLINE_S, LiveServer

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.clients
MODEL = "ouro-tiny"
STORY = "Once upon a time"
SUM = [{"role": "user", "content": "What is 2 plus 3?"}]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def test_a_completion_reads_as_over_plain_http(client: openai.OpenAI, calls: Calls) -> None:
    expected = await calls.complete(prompt=STORY, max_tokens=12, temperature=0, logprobs=2)
    answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=12, temperature=0, logprobs=2)
    choice = answer.choices[0]

    assert (expected.choice.text, "length") == (choice.text, choice.finish_reason)
    assert choice.logprobs is not None
    assert expected.choice.logprobs == choice.logprobs.token_logprobs
    assert expected.choice.text == "".join(choice.logprobs.tokens or [])
    assert [0, *(len(text) for text in _prefixes(choice.logprobs.tokens or []))] == choice.logprobs.text_offset
    assert answer.usage is not None
    assert (12, expected.usage["prompt_tokens"]) == (answer.usage.completion_tokens, answer.usage.prompt_tokens)
    assert expected.choice.exit_depths == choice.model_extra["exit_depths"]


def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert "length" == chunks[-2].choices[0].finish_reason
    assert ([], whole.usage) == (chunks[-1].choices, chunks[-1].usage)
    assert {chunks[0].id} == {chunk.id for chunk in chunks}


def test_a_chat_answers_the_sum(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]

    assert ("assistant", "2 plus 3 is 5.", "stop") == (
        choice.message.role,
        choice.message.content,
        choice.finish_reason,
    )
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(choice.model_extra["exit_depths"]) == len(entries)
    for entry in entries:
        assert 3 == len(entry.top_logprobs)
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=SUM,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]

    assert "assistant" == deltas[0].role
    assert "2 plus 3 is 5." == "".join(delta.content or "" for delta in deltas)
    assert "stop" == chunks[-2].choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert 16 == chunks[-1].usage.prompt_tokens


def test_n_choices_are_drawn_apart_and_again_the_same(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    texts = [choice.text for choice in first.choices]

    assert [0, 1] == [choice.index for choice in first.choices]
    assert 2 == len(set(texts))
    assert texts == [choice.text for choice in second.choices]
    assert first.usage is not None
    assert 24 == first.usage.completion_tokens


def test_stop_cuts_before_the_stop_string(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stopped = client.completions.create(**asked, stop=["boy", "."]).choices[0]

    assert "boy" in whole
    assert (whole[: whole.index("boy")], "stop") == (stopped.text, stopped.finish_reason)


def test_extra_body_reaches_the_loops(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=6, extra_body={"max_loops": 2, "exit_threshold": 1.0}
    )

    assert [4, 2, 2, 2, 2, 2] == answer.choices[0].model_extra["exit_depths"]


def test_errors_arrive_as_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt=STORY, max_tokens=5000)
    assert ("context_length_exceeded", "max_tokens") == (bad.value.code, bad.value.param)

    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt=STORY, extra_body={"loopiness": 3})
    assert ("unsupported_field", "loopiness") == (unknown.value.code, unknown.value.param)

    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=SUM)
    assert ("model_not_found", "model") == (missing.value.code, missing.value.param)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [MODEL] == [model.id for model in client.models.list()]
    assert 4 == client.models.retrieve(MODEL).model_extra["loops"]


async def test_the_async_client_streams(live: LiveServer, calls: Calls) -> None:
    expected = await calls.chat("What is 2 plus 3?", max_tokens=20, temperature=0)
    async with openai.AsyncOpenAI(
        base_url=f"{live.base_url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    ) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=SUM, max_tokens=20, temperature=0, stream=True
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert expected.choice.text == "".join(texts)


def _prefixes(tokens: list[str]) -> list[str]:
    return ["".join(tokens[:end]) for end in range(1, len(tokens))]
