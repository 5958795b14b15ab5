"""The clockwork of a run: rows that are due become requests, their ends make further rows due, each is recorded.

Owns the run's clock and tasks. It knows targets by their protocol only.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Protocol

from epicycle.tools.replaying.facts import Facts
from epicycle.tools.replaying.observed import Observed, RequestRecord, fill
from epicycle.tools.replaying.prompts import Outgoing, Prompts
from epicycle.tools.replaying.schedule import Held, Schedule

READ_A_TURN = 64

Take = Callable[[RequestRecord, Observed | None], None]


class Target(Protocol):
    """Where requests go. `send` never raises for what a server does: that is in `seen`."""

    name: str

    async def facts(self, model: str = "") -> Facts: ...

    async def counters(self) -> dict[str, float]: ...

    async def send(self, request: Outgoing, session: str, seen: Observed) -> None: ...


async def drive(schedule: Schedule, prompts: Prompts, target: Target, take: Take) -> None:
    """Every row of the schedule to its end. Raises TraceError and ReplayError; what runs then is cancelled."""
    run = _Run(schedule, prompts, target, take)
    try:
        async with asyncio.TaskGroup() as group:
            await run.all(group)
    except* Exception as failed:
        raise failed.exceptions[0] from None


class _Run:
    def __init__(self, schedule: Schedule, prompts: Prompts, target: Target, take: Take) -> None:
        self._schedule, self._prompts, self._target, self._take = schedule, prompts, target, take
        self._wake = asyncio.Event()
        self._start_s = 0.0

    def now_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._start_s)

    async def all(self, group: asyncio.TaskGroup) -> None:
        self._schedule.read()  # what can be wrong with the trace's beginning is, before anything is sent
        gc.freeze()  # a collection that looks through all that was read ahead would be schedule lag
        self._start_s = time.perf_counter()
        while not self._schedule.is_done:
            for held in self._schedule.take(self.now_ms()):
                group.create_task(self._one(held))
            self._record_skipped()
            if not self._schedule.is_done:
                await self._rest()
            self._schedule.read(self.now_ms(), READ_A_TURN)
        self._record_skipped()

    async def _rest(self) -> None:
        """Until a row ends or the next one is due."""
        due_ms = self._schedule.next_due_ms
        timer = None
        if due_ms is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, due_ms - self.now_ms()) / 1e3, self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    async def _one(self, held: Held) -> None:
        record = RequestRecord(id=held.id, session=held.session.name, turn=held.turn, line=held.line)
        record.planned_ms, record.held_ms = held.due_ms, held.granted_ms - held.due_ms
        record.tools = [str(one.get("tool_name") or one.get("name") or "tool") for one in held.row.tool_events]
        request = self._prompts.make(held)
        if request is None:
            record.outcome = "dropped"
            self._prompts.passed_over(held)
            self._end(held, record, None)
            return
        record.prompt_tokens, record.asked_tokens = request.prompt_tokens, request.output_tokens
        seen = Observed(self.now_ms)
        record.sent_ms = self.now_ms()
        record.lag_ms = record.sent_ms - held.granted_ms
        await self._target.send(request, held.session.name, seen)
        fill(record, seen)
        if record.outcome == "ok":
            self._prompts.answered(held, request, seen.text, seen.ids or None)
        else:
            self._prompts.passed_over(held)
        self._end(held, record, seen)

    def _end(self, held: Held, record: RequestRecord, seen: Observed | None) -> None:
        record.end_ms = self.now_ms()
        self._schedule.ended(held, record.end_ms, is_ok=record.outcome != "failed")
        self._wake.set()
        self._take(record, seen)

    def _record_skipped(self) -> None:
        for held in self._schedule.skipped:
            session = held.session.name
            self._take(
                RequestRecord(id=held.id, session=session, turn=held.turn, line=held.line, outcome="skipped"), None
            )
        self._schedule.skipped.clear()
