"""aiperf's inputs: the superset of Mooncake rows (`mooncake_trace`) and conversations in one line (`multi_turn`).

Rows of one session_id follow each other. A row with messages carries the whole conversation unless message_mode says
"delta"; text, hashes and lengths of a session are what is new. Output lengths are caps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, checked, json_objects, json_rows
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import BlockHash, Milliseconds, Tokens, TraceRow, TraceRowError

FIELDS = {"text_input", "messages", "input_length", "session_id", "payload"}


class Aiperf:
    name = "aiperf"
    about = "JSONL: Mooncake fields, or text_input or messages, with session_id, delay, message_mode, extra"
    times = "milliseconds"

    def sniff(self, head: Head) -> bool:
        return bool(FIELDS & head.fields.keys())

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        return json_rows(source, _Line, _row, faults)


class _Line(msgspec.Struct, kw_only=True):
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[BlockHash] | None = None
    session_id: str = ""
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    message_mode: Literal["history", "delta"] | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    payload: Any = None


def _row(line: _Line) -> TraceRow:
    if line.payload is not None:
        raise TraceRowError("rows with a raw body aren't read", "payload")
    messages, text = line.messages, line.text_input
    if text is not None and line.session_id:
        messages, text = [{"role": "user", "content": text}], None
    is_whole = not line.session_id or line.messages is not None
    return TraceRow(
        session_id=line.session_id,
        timestamp=line.timestamp,
        delay=line.delay,
        input_length=line.input_length,
        output_length=line.output_length,
        output_mode="cap",
        hash_ids=line.hash_ids,
        text_input=text,
        messages=messages,
        message_mode=line.message_mode or ("history" if is_whole else "delta"),
        tools=line.tools,
        extra=line.extra or {},
    )


class AiperfMultiTurn:
    name = "aiperf-multi-turn"
    about = "JSONL: session_id and turns of text with timestamp or delay"
    times = "milliseconds"

    def sniff(self, head: Head) -> bool:
        return isinstance(head.fields.get("turns"), list)

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        for number, talk in json_objects(source, _Talk, faults):
            yield from checked(source, number, faults, _turns(talk, number))


class _Turn(msgspec.Struct, kw_only=True):
    text: str | None = None
    texts: list[str] | None = None
    role: str = "user"
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    output_length: Tokens | None = None
    extra: dict[str, Any] | None = None
    images: Any = None
    image: Any = None
    audios: Any = None
    audio: Any = None


class _Talk(msgspec.Struct, kw_only=True):
    turns: list[_Turn]
    session_id: str = ""


def _turns(talk: _Talk, number: int) -> Iterator[TraceRow]:
    session = talk.session_id or f"line {number}"
    for index, turn in enumerate(talk.turns):
        if turn.timestamp is not None and turn.delay is not None:
            raise TraceRowError("timestamp and delay exclude each other", f"turns[{index}].delay")
        for name in ("image", "images", "audio", "audios"):
            if getattr(turn, name) is not None:
                raise TraceRowError("only text is replayed", f"turns[{index}].{name}")
        text = turn.text if turn.text is not None else "\n".join(turn.texts or [])
        if not text:
            raise TraceRowError("has no text", f"turns[{index}].text")
        yield TraceRow(
            session_id=session,
            timestamp=turn.timestamp,
            delay=turn.delay,
            messages=[{"role": turn.role, "content": text}],
            message_mode="delta",
            output_length=turn.output_length,
            output_mode="cap",
            extra=turn.extra or {},
        )
