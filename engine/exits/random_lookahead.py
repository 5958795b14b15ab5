"""Exit rule `random_lookahead`: a frozen random head scores the state; a stand-in with the timing of a lookahead.

The score after loop k is s = sigmoid(w . state), direct (no hazard product). When it has reached the threshold and
k + 1 >= min_loops the row leaves at k + 1, so never before loop 2. The weights are normal with the model's
initializer std, drawn on the CPU from a generator of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitDecision, ExitRows, leave_next
from epicycle.engine.exits.numerics import sigmoid, tree_sum
from epicycle.engine.exits.registry import RuleSetup


class RandomLookahead:
    def __init__(self, weight: Tensor) -> None:
        """`weight` [H] float32 on the rows' device; it reads the first H values of a state."""
        self.weight = weight

    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        generator = torch.Generator().manual_seed(setup.random_seed)
        return cls((torch.randn(setup.hidden_size, generator=generator) * setup.init_std).to(setup.device))

    def score(self, state: Tensor) -> Tensor:
        """[N] float32 in [0, 1] for states [N, W]."""
        return sigmoid(tree_sum(state[:, : len(self.weight)].float() * self.weight))

    def decide(self, rows: ExitRows) -> ExitDecision:
        reached = self.score(rows.state_after) >= rows.threshold
        return leave_next(rows, reached, rows.loops_done + 1, rows.survival)


def oracle(scores: Sequence[float], threshold: float, min_loops: int, max_loops: int) -> int:
    """The exit depth of one token on the host; scores[k - 1] is s after loop k."""
    limit = np.float32(threshold)
    for k in range(1, max_loops):
        if limit < 1 and np.float32(scores[k - 1]) >= limit and k + 1 >= min_loops:
            return k + 1
    return max_loops
