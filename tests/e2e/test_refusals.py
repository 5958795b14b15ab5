"""Everything a client can get wrong: the status, the code, the field's name, and a server that goes on."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from tests.e2e.client import CHAT, COMPLETIONS, HELLO, Client

NUMBERS = [-1, 1 << 63, 10**30, True, "1", [], {}]
INTEGERS = ["n", "max_tokens", "top_k", "seed", "min_tokens", "min_loops", "max_loops", "noise_seed", "priority"]
FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "exit_threshold",
]
MAY_BE_NEGATIVE = {"top_k", "seed", "priority", "presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize("field", [*INTEGERS, *FLOATS])
async def test_hostile_numbers_are_refused_by_name(client: Client, field: str) -> None:
    for value in NUMBERS:
        answer = await client.complete(**({"max_tokens": 1} | {field: value}))
        if value == -1 and field in MAY_BE_NEGATIVE:
            assert 200 == answer.status, answer.body
            continue
        assert 400 == answer.status, (value, answer.body)
        assert field == answer.error["param"], (value, answer.body)
    assert 200 == (await client.complete(max_tokens=1)).status


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "-0.5", "1" + "0" * 5000])
@pytest.mark.parametrize("field", FLOATS)
async def test_numbers_that_are_none_are_refused(client: Client, field: str, value: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "%s": %s}' % (field.encode(), value.encode())
    answer = await client.post_raw(COMPLETIONS, body)
    if value == "-0.5" and field in MAY_BE_NEGATIVE:
        assert 200 == answer.status
    else:
        assert 400 == answer.status, answer.body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xe9"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 and more"}',
        b'{"prompt": "a"} trailing',
    ],
    ids=[
        "empty",
        "list",
        "cut",
        "null",
        "bom",
        "latin1",
        "deep",
        "deep-ignored",
        "surrogate",
        "low-surrogate",
        "trailing",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_bad_bodies_are_400(client: Client, path: str, body: bytes) -> None:
    answer = await client.post_raw(path, body)
    assert 400 == answer.status
    assert "invalid_request_error" == answer.error["code"] or answer.error["code"] == "unsupported_field"


async def test_lone_surrogate_is_named_with_its_offset(client: Client) -> None:
    answer = await client.post_raw(COMPLETIONS, b'{"prompt": "\\ud800"}')
    assert "lone surrogate escape at byte 12" in answer.error["message"]


@pytest.mark.parametrize(
    ("prompt", "is_fine"),
    [
        ([], False),
        ([-1], False),
        ([4096], False),
        ([4095], True),
        ([[1], [2]], True),
        ([[]], False),
        ([1, "a"], False),
        (["a", [1]], False),
        ([[1], 2], False),
        ("", False),
        ([""], False),
        ([1.5], False),
        ([True], False),
        ({"a": 1}, False),
        (None, False),
        ([1] * 1100, False),
        ([0], True),
    ],
)
async def test_prompt_ids_are_checked(client: Client, prompt: Any, is_fine: bool) -> None:
    answer = await client.complete(prompt, max_tokens=1)
    assert (200 if is_fine else 400) == answer.status, answer.body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("best_of", 3),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("prompt_logprobs", 1),
        ("nonsense", 1),
        ("min_loop", 2),
    ],
)
async def test_fields_not_offered_are_named(client: Client, field: str, value: Any) -> None:
    error = (await client.complete(max_tokens=1, **{field: value})).error
    assert ("unsupported_field", field) == (error["code"], error["param"])


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"best_of": 1, "n": 1, "suffix": None, "logit_bias": None, "presence_penalty": 0, "frequency_penalty": 0},
        {"repetition_penalty": 1.0, "top_k": -1, "length_penalty": 1.0, "response_format": {"type": "text"}},
        {"prompt_cache_key": "k", "stop": None, "logprobs": None, "stream": None, "echo": False, "seed": None},
    ],
)
async def test_harmless_and_neutral_fields_pass(client: Client, fields: dict[str, Any]) -> None:
    assert 200 == (await client.complete(max_tokens=1, **fields)).status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"logprobs": 1_000_000_000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_loops": 5}, "min_loops"),
        ({"max_loops": 5}, "max_loops"),
        ({"min_loops": 3, "max_loops": 2}, "min_loops"),
        ({"exit_trace": [4, 1]}, "exit_trace"),
        ({"trace_id": "x"}, "trace_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"model": 5}, "model"),
    ],
)
async def test_values_out_of_range_are_400_with_param(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = await client.complete(**({"max_tokens": 1} | fields))
    assert (400, param) == (answer.status, answer.error["param"]), answer.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_chat_values_are_checked(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = await client.post(CHAT, **({"messages": HELLO} | fields))
    assert (400, param) == (answer.status, answer.error["param"]), answer.body


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_does_not_fit_the_context_is_refused_with_numbers(client: Client, is_stream: bool) -> None:
    for prompt, limit, is_fine in [
        ([5] * 1000, 24, True),
        ([5] * 1000, 25, False),
        ([5] * 1024, 1, False),
        ([5] * 1025, None, False),
    ]:
        answer = await client.complete(prompt, max_tokens=limit, stream=is_stream)
        if is_fine:
            assert 200 == answer.status
            continue
        assert (400, "context_length_exceeded") == (answer.status, answer.error["code"])
        assert str(len(prompt)) in answer.error["message"]
        assert "1024" in answer.error["message"]


async def test_default_limit_is_clipped_to_the_context(client: Client) -> None:
    answer = await client.complete([5] * 1020, ignore_eos=True)
    assert (4, "length") == (answer.json["usage"]["completion_tokens"], answer.choice["finish_reason"])


async def test_unknown_model_is_404_naming_the_served_one(client: Client) -> None:
    answer = await client.complete(model="gpt-4")
    assert (404, "model_not_found") == (answer.status, answer.error["code"])
    assert "ouro-tiny" in answer.error["message"]
    assert 404 == (await client.get("/v1/models/gpt-4")).status
    assert 200 == (await client.complete(model="ouro-tiny", max_tokens=1)).status


async def test_every_http_error_has_the_same_shape(client: Client) -> None:
    assert ("not_found", 404) == await outcome(client, "GET", "/nothing")
    assert ("method_not_allowed", 405) == await outcome(client, "GET", COMPLETIONS)
    assert ("method_not_allowed", 405) == await outcome(client, "DELETE", "/v1/models")
    kind = {"Content-Type": "text/plain"}
    assert ("unsupported_media_type", 415) == await outcome(client, "POST", CHAT, data=b"{}", headers=kind)
    big = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    assert ("request_too_large", 413) == await outcome(
        client, "POST", COMPLETIONS, data=io.BytesIO(big), headers={"Content-Type": "application/json"}
    )
    assert ("headers_too_large", 431) == await outcome(client, "GET", "/livez", headers={"X-Long": "a" * 9000})
    assert ("invalid_request_error", 400) == await outcome(
        client, "POST", CHAT, data=b"no gzip", headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
    )


async def outcome(client: Client, method: str, path: str, **options: Any) -> tuple[str, int]:
    answer = await client.send(method, path, **options)
    return answer.error["code"], answer.status


async def test_bytes_that_are_no_http_are_answered_in_json(client: Client) -> None:
    port = int(client.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"NONSENSE\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert "invalid_request_error" == json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    writer.close()


async def test_detokenize_checks_ids(client: Client) -> None:
    answer = await client.post("/detokenize", tokens=[1, 9999])
    assert (400, "tokens") == (answer.status, answer.error["param"])
