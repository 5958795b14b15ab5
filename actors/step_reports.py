"""Arithmetic on StepReports: folding an unsent one into the next, and totals that outlive an epoch.

Owns sums. It must not know what the numbers mean or who reads them.
"""

from __future__ import annotations

import msgspec

from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.columns import I32, U64, pack, unpack_list
from epicycle.transport.wire.plan import ROWS_PER_TICK_BOUNDS, StepReport

TOTALS = (
    "ticks",
    "decode_row_loops",
    "prompt_row_loops",
    "loops_saved",
    "rows_in_ticks",
    "mixed_depth_ticks",
    "starved_latency",
    "starved_pool",
    "stale_messages",
    "prompt_tokens",
    "generated_tokens",
)


def merge_reports(waiting: Wire, new: Wire) -> StepReport:
    """One report that says what both say. A report from before a Reset is dropped: nobody wants it any more."""
    assert isinstance(waiting, StepReport) and isinstance(new, StepReport), (waiting, new)
    if (waiting.epoch, waiting.control_epoch) != (new.epoch, new.control_epoch):
        return new
    moved: dict[int, tuple[int, int]] = {}
    for report in (waiting, new):
        slots, gens, tokens = (unpack_list(I32, column) for column in (report.slots, report.gens, report.tokens))
        moved.update(zip(slots, zip(gens, tokens, strict=True), strict=True))
    return msgspec.structs.replace(
        new,
        slots=pack(I32, moved),
        gens=pack(I32, [gen for gen, _ in moved.values()]),
        tokens=pack(I32, [tokens for _, tokens in moved.values()]),
        freed_slots=waiting.freed_slots + new.freed_slots,
        freed_gens=waiting.freed_gens + new.freed_gens,
        saved_slots=waiting.saved_slots + new.saved_slots,
        saved_gens=waiting.saved_gens + new.saved_gens,
        saved_tokens=waiting.saved_tokens + new.saved_tokens,
        failed=waiting.failed + new.failed,
    )


class ReportTotals:
    """`value(name)` is the sum over all epochs seen: a report counts since its epoch began, metrics must not fall."""

    def __init__(self) -> None:
        self._past = dict.fromkeys(TOTALS, 0)
        self._past_rows = [0] * (len(ROWS_PER_TICK_BOUNDS) + 1)
        self._report: StepReport | None = None

    def update(self, report: StepReport) -> None:
        self._report = report

    def end_epoch(self) -> None:
        self._past = {name: self.value(name) for name in TOTALS}
        self._past_rows = self.rows_per_tick()
        self._report = None

    def value(self, name: str) -> int:
        now = getattr(self._report, name) if self._report is not None else 0
        return self._past[name] + int(now)

    def rows_per_tick(self) -> list[int]:
        """Ticks by their rows, as in StepReport."""
        now = unpack_list(U64, self._report.rows_per_tick) if self._report is not None else []
        return [past + count for past, count in zip(self._past_rows, now, strict=True)] if now else self._past_rows
