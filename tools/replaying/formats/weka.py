"""Weka / AgentX: one JSON object a conversation, with nested sub-agents, times in seconds and hashes of its own.

A request waits for the requests of its stream that had ended when it was sent, so calls that overlapped do so again.
A sub-agent begins after what its caller had finished; the caller's next request waits for sub-agents that had ended.
Nested times are absolute in published files and relative in raw ones: relative where they begin before their wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, checked, json_objects
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import BlockHash, Milliseconds, Tokens, TraceRow, TraceRowError

BLOCK_TOKENS = 64
DEEPEST = 32
MOST_OPEN = 256  # requests at once that later ones may wait for


class Weka:
    name = "weka"
    about = "JSON or JSONL, one conversation each: requests of t, in, out, hash_ids; sub-agents nested"
    times = "seconds since the conversation began"

    def sniff(self, head: Head) -> bool:
        return isinstance(head.fields.get("requests"), list) or '"requests"' in head.line[:4096]

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        for number, talk in json_objects(source, _Talk, faults):
            name = talk.id or f"{source.path.name}:{number}"
            yield from checked(source, number, faults, _rows(talk, name, faults))


class _Request(msgspec.Struct, kw_only=True):
    type: str = "n"
    t: Milliseconds = 0.0  # seconds
    input: Tokens | None = msgspec.field(name="in", default=None)
    out: Tokens | None = None
    hash_ids: list[BlockHash] | None = None
    api_time: Milliseconds | None = None
    think_time: Milliseconds | None = None
    duration_ms: Milliseconds | None = None
    agent_id: str = ""
    requests: list[dict[str, Any]] = []
    model: str | None = None


class _Talk(msgspec.Struct, kw_only=True):
    requests: list[_Request]
    id: str = ""
    block_size: int = BLOCK_TOKENS
    hash_id_scope: str = "local"


class _Sent(msgspec.Struct):
    """A row that was made, when its request had ended, in seconds, and what it had waited for."""

    id: str
    end_s: float | None
    waited_for: list[str]


def _rows(talk: _Talk, name: str, faults: Faults) -> Iterator[TraceRow]:
    scope = name if talk.hash_id_scope == "local" else ""
    yield from _Stream(talk, scope, faults).rows(talk.requests, name, 0.0, [], 0)


class _Stream:
    """Turns nested requests into rows. One per conversation."""

    def __init__(self, talk: _Talk, scope: str, faults: Faults) -> None:
        self._talk, self._scope, self._faults = talk, scope, faults

    def rows(
        self, requests: list[_Request], session: str, shift_s: float, callers: list[_Sent], depth: int
    ) -> Iterator[TraceRow]:
        """The rows of one stream of requests; `callers` had ended before it. Sub-agents are rows in between."""
        if depth > DEEPEST:
            raise TraceRowError(f"sub-agents nested deeper than {DEEPEST}", "requests")
        done = list(callers)
        for index, request in enumerate(requests):
            time_s = shift_s + request.t
            if request.requests:
                nested = _nested(request.requests, f"requests[{index}].requests")
                moved_s = time_s if nested[0].t < request.t else shift_s
                inner = f"{session}/{request.agent_id or index}"
                last: list[_Sent] = []
                for row in self.rows(nested, inner, moved_s, _ended(done, time_s), depth + 1):
                    last = [_Sent(row.request_id, None, row.wait_for or [])]
                    yield row
                if last and request.duration_ms is not None:
                    last[0].end_s = time_s + request.duration_ms / 1e3
                done += last
                continue
            if not request.hash_ids:
                self._faults.skip("no hash_ids")
                continue
            ended = _ended(done, time_s)
            before = {name for one in ended for name in one.waited_for}
            done = [one for one in done if one.id not in before]  # whoever waits for their followers waits for them
            ended = [one for one in ended if one.id not in before]
            row = self._row(request, f"{session}#{index}", session, time_s, ended)
            done = done[1 - MOST_OPEN :]
            done.append(_Sent(row.request_id, _end_s(request, time_s), row.wait_for or []))
            yield row

    def _row(self, request: _Request, name: str, session: str, time_s: float, ended: list[_Sent]) -> TraceRow:
        hashes, size = request.hash_ids or [], self._talk.block_size
        length = request.input if request.input is not None else len(hashes) * size
        if not (len(hashes) - 1) * size < length < (len(hashes) + 1) * size:
            length = len(hashes) * size  # system and tool tokens are counted beside the hashed ones
        waited_s = [one.end_s for one in ended if one.end_s is not None]
        delay_s = max(0.0, time_s - max(waited_s)) if waited_s else request.think_time
        return TraceRow(
            request_id=name,
            session_id=session,
            timestamp=1e3 * time_s,
            wait_for=[one.id for one in ended],
            delay=1e3 * delay_s if ended and delay_s is not None else None,
            input_length=length,
            output_length=request.out or 1,
            hash_ids=hashes,
            block_size=size,
            hash_scope=self._scope,
            meta={"model": request.model} if request.model else {},
        )


def _ended(done: list[_Sent], time_s: float) -> list[_Sent]:
    """Those that had ended by then; one whose end isn't told had, if it is the last."""
    return [one for one in done if (one.end_s is None and one is done[-1]) or (one.end_s or time_s + 1) <= time_s]


def _end_s(request: _Request, time_s: float) -> float | None:
    return None if request.api_time is None else time_s + request.api_time


def _nested(values: list[dict[str, Any]], field: str) -> list[_Request]:
    try:
        return msgspec.convert(values, list[_Request])
    except msgspec.ValidationError as error:
        raise TraceRowError(str(error), field) from None
