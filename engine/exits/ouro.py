"""Exit rules `ouro` and `ouro_delayed`: the trained gate's hazards, tested in the same loop or acted on one loop late.

After loop k with gate logit g: p = sigmoid(g), R *= 1 - p, F = 1 - R, in this order and in float32; hazards of loops
below `min_loops` count. `ouro` leaves at k when F has reached the threshold; `ouro_delayed`, kept to reproduce engines
that read the gate a loop late, then leaves at k + 1, with the minimum held against k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from torch import Tensor

from epicycle.engine.exits.base import ExitDecision, ExitRows, leave_next, leave_now
from epicycle.engine.exits.numerics import sigmoid
from epicycle.engine.exits.registry import RuleSetup


def survive(rows: ExitRows) -> Tensor:
    """[N] float32: the survival after this loop's hazard."""
    assert rows.gate is not None
    return rows.survival * (1.0 - sigmoid(rows.gate))


class Ouro:
    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        return cls()

    def decide(self, rows: ExitRows) -> ExitDecision:
        survival = survive(rows)
        return leave_now(rows, 1.0 - survival >= rows.threshold, survival)


class OuroDelayed:
    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        return cls()

    def decide(self, rows: ExitRows) -> ExitDecision:
        survival = survive(rows)
        return leave_next(rows, 1.0 - survival >= rows.threshold, rows.loops_done, survival)


def oracle(hazards: Sequence[float], threshold: float, min_loops: int, max_loops: int) -> int:
    """The exit depth of one token under `ouro` on the host; hazards[k - 1] is p of loop k."""
    one, survival, limit = np.float32(1), np.float32(1), np.float32(threshold)
    for k in range(1, max_loops):
        survival = survival * (one - np.float32(hazards[k - 1]))
        if limit < one and one - survival >= limit and k >= min_loops:
            return k
    return max_loops


def oracle_delayed(hazards: Sequence[float], threshold: float, min_loops: int, max_loops: int) -> int:
    """The exit depth of one token under `ouro_delayed`: a loop after the trigger, within the maximum."""
    trigger = oracle(hazards, threshold, min_loops, max_loops)
    return min(trigger + 1, max_loops)
