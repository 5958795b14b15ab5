"""Replays without servers or clocks: rows in memory, a schedule turned by hand, a target of a few lines."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.facts import Facts
from epicycle.tools.replaying.formats.base import Numbered
from epicycle.tools.replaying.formats.registry import choose
from epicycle.tools.replaying.observed import Observed
from epicycle.tools.replaying.prompts import Outgoing
from epicycle.tools.replaying.schedule import Held, Schedule
from epicycle.tools.replaying.source import Limits, Source
from epicycle.tools.replaying.timing import Timing
from epicycle.transport.trace_rows import TraceRow


def row(name: str = "", session: str = "", **fields: object) -> TraceRow:
    """A row of one token, unless `fields` say more."""
    defaults: dict[str, object] = {} if "messages" in fields or "token_ids" in fields else {"input_length": 1}
    return TraceRow(request_id=name, session_id=session, **(defaults | {"output_length": 1} | fields))  # type: ignore[arg-type]


def numbered(rows: Iterable[TraceRow]) -> Iterator[Numbered]:
    return (Numbered(line, one) for line, one in enumerate(rows, start=1))


def read_all(
    path: Path, name: str = "auto", faults: Faults | None = None, limits: Limits | None = None
) -> list[Numbered]:
    source = Source(path, limits)
    return list(choose(source, name).rows(source, faults or Faults()))


@dataclass
class Played:
    """When each row was sent and had ended, in milliseconds of a clock that only moves when nothing else can."""

    sent: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    rows: dict[str, TraceRow] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    most_at_once: int = 0
    most_held: int = 0


def play(schedule: Schedule, took_ms: float = 10.0, fails: Collection[str] = ()) -> Played:
    """Turn a schedule to its end; every request takes `took_ms`."""
    played = Played()
    flying: list[tuple[float, int, Held]] = []
    now_ms, number = 0.0, 0
    schedule.read(now_ms)
    turns = 0
    while not schedule.is_done:
        turns += 1
        assert turns < 1000 + 20 * schedule.rows_read, "the schedule stands still"
        for held in schedule.take(now_ms):
            number += 1
            played.sent[held.id], played.rows[held.id] = now_ms, held.row
            heapq.heappush(flying, (now_ms + took_ms, number, held))
        played.most_at_once = max(played.most_at_once, len({one.session for _, _, one in flying}))
        played.most_held = max(played.most_held, schedule.held)
        if schedule.is_done:
            break
        due_ms = schedule.next_due_ms
        if flying and (due_ms is None or flying[0][0] <= due_ms):
            now_ms, _, held = heapq.heappop(flying)
            played.ended[held.id] = now_ms
            schedule.ended(held, now_ms, is_ok=held.id not in fails)
        elif due_ms is not None:
            now_ms = max(now_ms, due_ms)
        schedule.read(now_ms, 16)
        played.skipped += [one.id for one in schedule.skipped]
        schedule.skipped.clear()
    played.skipped += [one.id for one in schedule.skipped]
    return played


def scheduled(
    rows: Iterable[TraceRow], timing: Timing | None = None, faults: Faults | None = None, **options: object
) -> Schedule:
    return Schedule(numbered(rows), timing or Timing(), faults or Faults(), **options)  # type: ignore[arg-type]


class EchoTarget:
    """Answers every request at once with as many tokens as asked for; remembers bodies. `fails`: by prompt order."""

    name = "echo"

    def __init__(self, facts: Facts, fails: Collection[int] = ()) -> None:
        self.bodies: list[dict[str, object]] = []
        self._facts = facts
        self._fails = fails

    async def facts(self, model: str = "") -> Facts:
        return self._facts

    async def counters(self) -> dict[str, float]:
        return {}

    async def send(self, request: Outgoing, session: str, seen: Observed) -> None:
        self.bodies.append(request.body)
        seen.byte()
        if len(self.bodies) - 1 in self._fails:
            seen.fail("overloaded", "no room", 429)
            return
        for index in range(request.body["max_tokens"]):
            seen.token("x", [index + 3] if self._facts.takes_ids_back else [], [1 + index % 4])
        seen.finish_reason, seen.status = "length", 200
        seen.usage = {"prompt_tokens": request.prompt_tokens or 1, "prompt_tokens_details": {"cached_tokens": 0}}
