"""Times that may pass for a request: which limits it has, and which of them are over.

Owns the heap of limits. It must not know whether a request waits, runs or is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from epicycle.transport.config import Config
from epicycle.transport.wire.request import Submit


@dataclass(frozen=True, slots=True, order=True)
class Limit:
    """`covers`: life (queue included), queue (until it has a slot), or generation (from slot to end)."""

    covers: str
    ms: float
    knob: str


class TimeLimits:
    """Limits by the time at which they are over; what is added is never taken back, only ignored."""

    def __init__(self, config: Config) -> None:
        self._life_ms = config.server.request_deadline_s * 1e3
        self._queue_ms = config.scheduler.queue_limit_s * 1e3
        self._generation_ms = config.scheduler.generation_limit_s * 1e3
        self._ahead: list[tuple[float, int, Limit]] = []

    def submitted(self, submit: Submit, now_s: float) -> None:
        self._add(submit.rid, now_s, Limit("life", submit.deadline_ms or self._life_ms, "server.request_deadline_s"))
        self._add(submit.rid, now_s, Limit("queue", self._queue_ms, "scheduler.queue_limit_s"))

    def started(self, rid: int, now_s: float) -> None:
        self._add(rid, now_s, Limit("generation", self._generation_ms, "scheduler.generation_limit_s"))

    def over(self, now_s: float) -> Iterator[tuple[int, Limit]]:
        """What has passed since the last call."""
        while self._ahead and self._ahead[0][0] <= now_s:
            _, rid, limit = heapq.heappop(self._ahead)
            yield rid, limit

    def _add(self, rid: int, now_s: float, limit: Limit) -> None:
        if limit.ms > 0:
            heapq.heappush(self._ahead, (now_s + limit.ms / 1e3, rid, limit))
