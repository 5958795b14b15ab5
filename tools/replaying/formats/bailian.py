"""Qwen-Bailian: chats as chains of parent ids, every row with its full context as hashes of 16 tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, json_rows, seconds
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import BlockHash, Tokens, TraceRow

BLOCK_TOKENS = 16
ROOT = -1
REMEMBERED = 200_000  # chats whose root is known; an answer to an older one begins a conversation of its own


class Bailian:
    name = "bailian"
    about = "JSONL: chat_id, parent_chat_id, timestamp, lengths, hash_ids of 16 tokens"
    times = "seconds"

    def sniff(self, head: Head) -> bool:
        return {"chat_id", "parent_chat_id"} <= head.fields.keys()

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        roots: OrderedDict[int, int] = OrderedDict()
        return json_rows(source, _Line, lambda line: _row(line, roots), faults)


class _Line(msgspec.Struct, kw_only=True):
    chat_id: int
    parent_chat_id: int = ROOT
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockHash]
    type: str = ""
    turn: int = 0


def _row(line: _Line, roots: OrderedDict[int, int]) -> TraceRow:
    time_ms = seconds(str(line.timestamp), "timestamp")
    root = roots.get(line.parent_chat_id)
    roots[line.chat_id] = line.chat_id if root is None else root
    if len(roots) > REMEMBERED:
        roots.popitem(last=False)
    return TraceRow(
        request_id=str(line.chat_id),
        session_id=str(roots.get(line.chat_id, line.chat_id)),
        wait_for=[] if root is None else [str(line.parent_chat_id)],
        timestamp=time_ms,
        input_length=line.input_length,
        output_length=line.output_length,
        hash_ids=line.hash_ids,
        block_size=BLOCK_TOKENS,
        meta={"type": line.type} if line.type else {},
    )
