"""Whatever a body holds, it becomes a Spec within all limits or a 400 that names what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epicycle.actors.gateway.bodies import ChatBody, CompletionBody
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.served import load_files, serve
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.validate import Validator
from epicycle.actors.mock_model import mock_capabilities
from epicycle.transport.config import Config

SERVED = serve(load_files(Config()), mock_capabilities(Config()))
FIELDS = sorted({field.name for kind in (CompletionBody, ChatBody) for field in msgspec.structs.fields(kind)})
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
SMALL = st.integers(-1, 5) | st.floats(-1, 3)
ANYTHING = st.recursive(
    SCALARS | SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), ANYTHING, max_size=5)


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    with ThreadPoolExecutor(1) as threads:
        yield Validator(Config(), threads)


def read(validator: Validator, kind: str, content: bytes) -> Spec:
    check = validator.chat if kind == "chat" else validator.completion
    return asyncio.run(check(content, SERVED))


def assert_within_limits(spec: Spec) -> None:
    for prompt, sampling, loops in zip(spec.prompts, spec.samplings, spec.loops, strict=True):
        assert prompt.ids
        assert 0 <= min(prompt.ids)
        assert max(prompt.ids) < 4096
        assert len(prompt.ids) + sampling.max_tokens <= 1024
        assert 0 <= sampling.min_tokens <= sampling.max_tokens
        assert 0 <= sampling.temperature <= 2
        assert 0 < sampling.top_p <= 1
        assert 0 <= sampling.top_k < 1 << 31
        assert -(1 << 63) <= sampling.seed < 1 << 63
        assert 1 <= loops.min_loops <= loops.max_loops <= 4
        assert 0 <= loops.exit_threshold <= 1
    assert 1 <= spec.choices <= 64


@pytest.mark.parametrize("kind", ["completions", "chat"])
@settings(max_examples=250, deadline=None)
@given(fields=BODIES)
def test_any_json_is_a_spec_or_a_refusal(validator: Validator, kind: str, fields: dict[str, Any]) -> None:
    start: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if kind == "chat" else {"prompt": "a"}
    try:
        assert_within_limits(read(validator, kind, msgspec.json.encode(start | fields)))
    except ApiError as error:
        assert error.status in (400, 404)
        assert error.message


@settings(max_examples=250, deadline=None)
@given(content=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_a_refusal(validator: Validator, content: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(validator, "completions", content)
    assert 400 == caught.value.status


def test_seed_is_fresh_when_absent_and_kept_when_given(validator: Validator) -> None:
    seeds = {read(validator, "completions", b'{"prompt": "a"}').samplings[0].seed for _ in range(4)}
    assert 4 == len(seeds)
    assert -5 == read(validator, "completions", b'{"prompt": "a", "seed": -5}').samplings[0].seed


def test_stop_ids_are_the_union_unless_eos_is_ignored(validator: Validator) -> None:
    spec = read(validator, "completions", b'{"prompt": "a", "stop_token_ids": [9]}')
    assert (frozenset({0, 2, 9}), frozenset({9})) == (spec.stop_ids, spec.named_stop_ids)
    assert frozenset() == read(validator, "completions", b'{"prompt": "a", "ignore_eos": true}').stop_ids


def test_without_a_tokenizer_ids_are_served_and_text_refused(validator: Validator) -> None:
    files = type(SERVED.files)("m", None, None, {}, {})
    bare = serve(files, SERVED.facts)
    assert [[5, 6]] == [p.ids for p in asyncio.run(validator.completion(b'{"prompt": [5, 6]}', bare)).prompts]
    for content in (b'{"prompt": "a"}', b'{"prompt": [5], "stop": "x"}'):
        with pytest.raises(ApiError, match=r"no tokenizer\.json"):
            asyncio.run(validator.completion(content, bare))
    with pytest.raises(ApiError, match=r"no tokenizer\.json"):
        asyncio.run(validator.chat(b'{"messages": [{"role": "user", "content": "a"}]}', bare))
