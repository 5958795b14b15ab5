"""Totals that a pump keeps since its epoch began, in the names of StepReport.

Shared by every pump, so that a counter is named once. Owns how ticks are counted by their rows; it must not know what
the rows were.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

from epicycle.transport.wire.columns import U64, pack
from epicycle.transport.wire.plan import ROWS_PER_TICK_BOUNDS


@dataclass(slots=True)
class TickCounters:
    """`rows_per_tick[i]` counts ticks of at most ROWS_PER_TICK_BOUNDS[i] rows (and more than the bound before)."""

    ticks: int = 0
    decode_row_loops: int = 0
    prompt_row_loops: int = 0
    loops_saved: int = 0
    rows_in_ticks: int = 0
    mixed_depth_ticks: int = 0
    starved_latency: int = 0
    starved_pool: int = 0
    stale_messages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    spilled_pages: int = 0  # of cached prefixes that have arrived on the host, for the control that asked
    rows_per_tick: list[int] = field(default_factory=lambda: [0] * (len(ROWS_PER_TICK_BOUNDS) + 1))

    def count_tick(self, rows: int) -> None:
        """One more tick, of `rows` rows."""
        self.ticks += 1
        self.rows_in_ticks += rows
        self.rows_per_tick[bisect_left(ROWS_PER_TICK_BOUNDS, rows)] += 1

    def report_fields(self) -> dict[str, Any]:
        """Keyword arguments of a StepReport."""
        return asdict(self) | {"rows_per_tick": pack(U64, self.rows_per_tick)}
