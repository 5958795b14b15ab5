"""When rows are due: the three schedules, the scale of time and the cap on gaps.

Owns the mapping from a trace's times to the run's milliseconds. Pure arithmetic on rows in the file's order; it must
not know dependencies or clocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from epicycle.transport.trace_rows import TraceRow, TraceRowError

LONGEST_GAP_MS = 86_400_000.0  # longer ones are units mistaken, or a run that nobody would wait for

Mode = Literal["closed", "trace", "rate"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """`scale` multiplies every gap, `gap_cap_ms` bounds it afterwards (0: doesn't). `rate_per_s`: conversations.

    `ramp_ms` spreads the beginnings of the first `ramped` conversations of a closed schedule; the others come later.
    """

    mode: Mode = "closed"
    scale: float = 1.0
    gap_cap_ms: float = 0.0
    ignore_delays: bool = False
    rate_per_s: float = 1.0
    is_poisson: bool = True
    ramp_ms: float = 0.0
    ramped: int = 0
    seed: int = 0


class Arrivals:
    """Times of rows as the file names them, one call a row in its order."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._random = random.Random(timing.seed)
        self._last_ms: float | None = None  # in the trace's time
        self._at_ms = 0.0  # the same in the run's
        self._next_ms = 0.0
        self._roots = 0

    def stamp(self, row: TraceRow) -> float | None:
        """The row's own time in the run; None where it has none or the schedule doesn't follow it.

        Raises TraceRowError for a gap of more than a day.
        """
        if self._timing.mode != "trace" or row.timestamp is None:
            return None
        gap_ms = row.timestamp - (row.timestamp if self._last_ms is None else self._last_ms)
        kept_ms = self._checked(self.gap(gap_ms), "timestamp")
        self._last_ms = row.timestamp
        self._at_ms += kept_ms
        return self._at_ms

    def root(self, stamp_ms: float | None) -> float:
        """When a row that waits for nobody is due."""
        timing = self._timing
        if timing.mode == "closed":
            self._roots += 1
            return timing.ramp_ms * min(1.0, (self._roots - 1) / max(1, timing.ramped))
        if timing.mode == "trace":
            return stamp_ms or 0.0
        due_ms = self._next_ms
        mean_ms = 1e3 / timing.rate_per_s
        self._next_ms += self._random.expovariate(1.0) * mean_ms if timing.is_poisson else mean_ms
        return due_ms

    def wait(self, row: TraceRow) -> float:
        """What passes between the end of the rows it waited for and the row. Raises TraceRowError for over a day."""
        if self._timing.ignore_delays:
            return 0.0
        delay_ms = self._checked(self.gap(row.delay or 0.0), "delay")
        return delay_ms + self._checked(self.gap(row.tool_wait_ms), "tool_wait_ms")

    @staticmethod
    def _checked(gap_ms: float, field: str) -> float:
        if abs(gap_ms) > LONGEST_GAP_MS:
            raise TraceRowError(f"makes a gap of {gap_ms / LONGEST_GAP_MS:,.1f} days; cap gaps with --gap-cap-s", field)
        return gap_ms

    def gap(self, gap_ms: float) -> float:
        """A gap as the run keeps it; rows may also go back in time."""
        scaled = gap_ms * self._timing.scale
        cap = self._timing.gap_cap_ms
        return max(-cap, min(scaled, cap)) if cap else scaled
