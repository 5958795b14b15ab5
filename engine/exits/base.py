"""What every exit rule takes and gives.

A rule is asked after each loop, with the rows of that loop, on the device, with no host round trip: its code uses fixed
shapes and no host value, so that a graph can hold it. The pump owns the per-slot state, gathers it into `ExitRows` and
stores what comes back. Scores are float32. Whatever the rule: a higher threshold is deeper, 1.0 never leaves early,
`max_loops` always wins. Prompt rows are not asked; they run the model's full depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRows:
    """N decode rows right after a loop. Parts that the rule's registry entry doesn't ask for may be None."""

    loops_done: Tensor  # [N] int64, this loop included: 1, 2, ...
    survival: Tensor  # [N] float32, product of (1 - hazard) of the loops before this one; 1 at the start of a token
    pending: Tensor  # [N] int64, loop named in advance as the last one, 0 where none is
    threshold: Tensor  # [N] float32 in [0, 1]
    min_loops: Tensor  # [N] int64
    max_loops: Tensor  # [N] int64
    state_after: Tensor  # [N, W]
    state_before: Tensor | None = None  # [N, W], as it entered this loop
    gate: Tensor | None = None  # [N] float32 logits
    previous_final: Tensor | None = None  # [N, H], final state of the previous token
    traced_depth: Tensor | None = None  # [N] int64, listed depth of this output


@dataclass(frozen=True, slots=True)
class ExitDecision:
    """Survival and pending are ready to store as they are: rows that leave get the values a new token starts with."""

    leave: Tensor  # [N] bool
    survival: Tensor  # [N] float32
    pending: Tensor  # [N] int64


class ExitRule(Protocol):
    def decide(self, rows: ExitRows) -> ExitDecision:
        """Which rows leave now. Changes nothing it is given."""
        ...


def at_limit(rows: ExitRows) -> Tensor:
    """[N] bool: rows that have used up their loops."""
    return rows.loops_done >= rows.max_loops


def settle(leave: Tensor, survival: Tensor, pending: Tensor) -> ExitDecision:
    """A decision in which rows that leave start afresh."""
    return ExitDecision(leave=leave, survival=survival.masked_fill(leave, 1.0), pending=pending.masked_fill(leave, 0))


def leave_now(rows: ExitRows, reached: Tensor, survival: Tensor) -> ExitDecision:
    """Rules that test in the same loop. `reached` [N] bool: the score has met the threshold."""
    early = reached & (rows.threshold < 1.0) & (rows.loops_done >= rows.min_loops)
    return settle(early | at_limit(rows), survival, rows.pending)


def leave_next(rows: ExitRows, reached: Tensor, first_loop: Tensor, survival: Tensor) -> ExitDecision:
    """Rules that name the last loop one ahead. `first_loop` [N] int64 is what the minimum is held against.

    A row whose named loop has just run leaves whatever its score says now.
    """
    due = (rows.pending > 0) & (rows.loops_done >= rows.pending)
    named = reached & (rows.threshold < 1.0) & (first_loop >= rows.min_loops)
    return settle(due | at_limit(rows), survival, (rows.loops_done + 1).masked_fill(~named, 0))
