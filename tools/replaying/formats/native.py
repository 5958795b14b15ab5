"""The native format: agentic Mooncake rows, and what `epicycle serve --record` writes."""

from __future__ import annotations

from collections.abc import Iterator

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, json_rows
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import TraceRow, TraceRowError

OWN_FIELDS = {"request_id", "wait_for", "branches", "tool_wait_ms", "prefix_reset", "token_ids", "exit_depths"}


class Native:
    name = "native"
    about = "JSONL of agentic Mooncake rows; what `epicycle serve --record` writes"
    times = "milliseconds"

    def sniff(self, head: Head) -> bool:
        return "schema" in head.fields or bool(OWN_FIELDS & head.fields.keys())

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        return json_rows(source, _Line, _row, faults)


class _Line(TraceRow, kw_only=True):
    """`schema` heads files of another version, whose dependencies are objects."""

    schema: str = ""


def _row(line: _Line) -> TraceRow:
    if line.schema:
        raise TraceRowError(f"is {line.schema[:60]!r}: only rows without a schema are read", "schema")
    return line
