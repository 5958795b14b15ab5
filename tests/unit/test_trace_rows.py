"""The native trace row: what is read back as written, and what is refused with its field."""

from __future__ import annotations

import json

import pytest

from epicycle.transport.trace_rows import TraceRow, TraceRowError, block_hashes, decode_row, encode_row


def test_a_row_comes_back_as_it_was_written() -> None:
    row = TraceRow(
        request_id="b", session_id="s", wait_for=["a"], delay=1.5, tool_wait_ms=20.0, messages=[{"role": "user"}],
        message_mode="delta", output_length=8, output_mode="cap", extra={"max_loops": 2}, exit_depths=[4, 2],
    )  # fmt: skip
    line = encode_row(row)
    assert line.endswith(b"\n")
    assert row == decode_row(line)


def test_defaults_are_left_out_of_the_line() -> None:
    assert b'{"output_length":2,"token_ids":[1,2]}\n' == encode_row(TraceRow(token_ids=[1, 2], output_length=2))


def test_nobody_to_wait_for_differs_from_the_row_before() -> None:
    assert decode_row(b'{"wait_for": [], "input_length": 1}').wait_for == []
    assert decode_row(b'{"input_length": 1}').wait_for is None


def test_unknown_fields_are_ignored() -> None:
    assert 3 == decode_row(b'{"input_length": 3, "colour": "red"}').input_length


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input_length": -1}, "input_length"),
        ({"input_length": True}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"input_length": 10**30}, "input_length"),
        ({"input_length": 4, "timestamp": -0.5}, "timestamp"),
        ({"input_length": 4, "timestamp": 1e300}, "timestamp"),
        ({"input_length": 4, "delay": "1"}, "delay"),
        ({"input_length": 513, "hash_ids": [1, -2]}, "hash_ids[1]"),
        ({"input_length": 513, "hash_ids": [1, 1 << 63]}, "hash_ids[1]"),
        ({"input_length": 513, "hash_ids": [1, 2, 3, 4]}, "hash_ids"),
        ({"hash_ids": []}, "hash_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "text_input": "a"}, "text_input"),
        ({"input_length": 0}, "input_length"),
        ({"output_length": 4}, "input_length"),
        ({"text_input": "a", "tools": []}, "tools"),
        ({"text_input": "a", "message_mode": "both"}, "message_mode"),
        ({"text_input": "a", "exit_depths": [0]}, "exit_depths[0]"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(TraceRowError) as raised:
        decode_row(json.dumps(fields).encode())
    assert field == raised.value.field


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{", b'{"input_length": NaN}', b"\x80\x04\x95", b'{"a":' * 100_000, b'{"delay": 1e999}']
)
def test_what_is_no_row_is_an_error(line: bytes) -> None:
    with pytest.raises(TraceRowError):
        decode_row(line)


def test_equal_beginnings_have_equal_hashes_and_only_they() -> None:
    prompt = list(range(40))
    other = [*prompt[:20], 7, *prompt[21:]]
    assert block_hashes(prompt, 16)[:1] == block_hashes(other, 16)[:1]
    assert not set(block_hashes(prompt, 16)[1:]) & set(block_hashes(other, 16)[1:])
    assert 3 == len(block_hashes(prompt, 16))
    assert not set(block_hashes(prompt, 16)) & set(block_hashes(prompt, 16, b"key"))
    assert not set(block_hashes(prompt + prompt, 40)[:1]) & set(block_hashes(prompt + prompt, 40)[1:])
