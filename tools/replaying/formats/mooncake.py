"""Mooncake (FAST'25): lengths and block hashes with arrival times; no text, no conversations."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, json_rows
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import BlockHash, Milliseconds, Tokens, TraceRow

FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
MORE = {"session_id", "text_input", "messages", "delay", "extra", "payload"}  # aiperf's superset


class Mooncake:
    name = "mooncake"
    about = "JSONL: timestamp, input_length, output_length, hash_ids of 512 tokens"
    times = "milliseconds"

    def sniff(self, head: Head) -> bool:
        return head.fields.keys() >= FIELDS and not MORE & head.fields.keys()

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        return json_rows(source, _Line, _row, faults)


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockHash]


def _row(line: _Line) -> TraceRow:
    return TraceRow(
        timestamp=line.timestamp,
        input_length=line.input_length,
        output_length=line.output_length,
        hash_ids=line.hash_ids,
    )
