"""TraceLab: rounds of coding agents with the times of messages and tools; lengths, no text.

A round is sent when the last user message or tool result before its first output came; what passed since the round
before is its tool wait, or its delay where a person was waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, json_rows, moment_ms
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import Tokens, TraceRow, TraceRowError

OUTPUTS = ("reasoning", "text", "tool_call")
INPUTS = ("user_message", "tool_result")
REMEMBERED = 50_000  # sessions whose last round is known


class TraceLab:
    name = "tracelab"
    about = "JSONL: rounds of agent sessions with timing_events, tools and token counts"
    times = "dates, or milliseconds"

    def sniff(self, head: Head) -> bool:
        return {"session_id", "round_index"} <= head.fields.keys() or "timing_events" in head.fields

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        before: OrderedDict[str, _Before] = OrderedDict()
        return json_rows(source, _Line, lambda line: _row(line, before, faults), faults)


class _Event(msgspec.Struct, kw_only=True):
    event_type: str = ""
    timestamp: str | float | None = None


class _Line(msgspec.Struct, kw_only=True):
    session_id: str
    round_index: int | None = None
    round_id: str | int = ""
    model: str | None = None
    input_tokens_total: Tokens
    prefix_tokens: Tokens | None = None
    newly_append_tokens: Tokens | None = None
    output_tokens: Tokens
    timing_events: list[_Event] | None = None
    tools: list[dict[str, Any]] | None = None


class _Before(msgspec.Struct):
    """A session's round before: when its last output came, and the tools it called."""

    end_ms: float | None
    tools: list[dict[str, Any]]


def _row(line: _Line, before: OrderedDict[str, _Before], faults: Faults) -> TraceRow | None:
    prefix = line.prefix_tokens or 0
    fresh = line.input_tokens_total - prefix
    if line.newly_append_tokens is not None and line.newly_append_tokens != fresh:
        text = f"is {line.newly_append_tokens}, but input_tokens_total - prefix_tokens is {fresh}"
        raise TraceRowError(text, "newly_append_tokens")
    if fresh < 0:
        raise TraceRowError(f"is {prefix}, above input_tokens_total", "prefix_tokens")
    asked, end_ms = _moments(line.timing_events or [])
    last = before.pop(line.session_id, None)
    before[line.session_id] = _Before(end_ms, line.tools or [])
    if len(before) > REMEMBERED:
        before.popitem(last=False)
    if not line.input_tokens_total:
        faults.skip("no prompt tokens")
        return None
    kept = min(prefix, line.input_tokens_total - 1)  # at least the last token is new, as a server sees it
    what, asked_ms = asked or ("", None)
    gap = max(0.0, asked_ms - last.end_ms) if last and asked_ms is not None and last.end_ms is not None else 0.0
    return TraceRow(
        request_id=f"{line.session_id}/{line.round_index if line.round_index is not None else line.round_id}",
        session_id=line.session_id,
        timestamp=asked_ms,
        delay=None if last is None else (0.0 if what == "tool_result" else gap),
        tool_wait_ms=gap if what == "tool_result" else 0.0,
        tool_events=last.tools if last else [],
        input_length=line.input_tokens_total - kept,
        prefix_length=kept,
        message_mode="delta",
        output_length=line.output_tokens,
        meta={"model": line.model} if line.model else {},
    )


def _moments(events: list[_Event]) -> tuple[tuple[str, float] | None, float | None]:
    """What was waited for last before the first output and when; when the last output came."""
    timed = [
        (moment_ms(one.timestamp, f"timing_events[{at}].timestamp"), one.event_type)
        for at, one in enumerate(events)
        if one.timestamp is not None
    ]
    outputs = [time_ms for time_ms, what in timed if what in OUTPUTS]
    until_ms = min(outputs, default=float("inf"))
    inputs = [(time_ms, what) for time_ms, what in timed if what in INPUTS and time_ms <= until_ms]
    last = max(inputs, default=None)
    return (last[1], last[0]) if last else None, max(outputs, default=None)
