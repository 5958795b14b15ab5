"""Exit rule `latent_diff`: a row leaves when a loop hardly moved its state.

d = ||s_before - s_after||_2 / ||s_after||_2 over the hidden width (of a Huginn row its state half, not the injection),
before any norm. Leaves at k when d <= 1 - threshold and k >= min_loops, so 0.97 leaves at a change of 0.03. Sums run
in a fixed order over the width, so a row's d doesn't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitDecision, ExitRows, leave_now
from epicycle.engine.exits.numerics import host_tree_sum, tree_sum
from epicycle.engine.exits.registry import RuleSetup


class LatentDiff:
    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        return cls(setup.hidden_size)

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """[N] float32 for states [N, W]; not a number where the new state is all zero, which never leaves early."""
        old, new = before[:, : self.hidden_size].float(), after[:, : self.hidden_size].float()
        change = old - new
        return torch.sqrt(tree_sum(change * change)) / torch.sqrt(tree_sum(new * new))

    def decide(self, rows: ExitRows) -> ExitDecision:
        assert rows.state_before is not None
        reached = self.distance(rows.state_before, rows.state_after) <= 1.0 - rows.threshold
        return leave_now(rows, reached, rows.survival)


def oracle(states: Sequence[npt.NDArray[np.float32]], threshold: float, min_loops: int, max_loops: int) -> int:
    """The exit depth of one token on the host; states[0] is the start state, states[k] the one after loop k."""
    limit = np.float32(threshold)
    for k in range(1, max_loops):
        change = states[k - 1] - states[k]
        distance = np.sqrt(host_tree_sum(change * change)) / np.sqrt(host_tree_sum(states[k] * states[k]))
        if limit < 1 and distance <= np.float32(1) - limit and k >= min_loops:
            return k
    return max_loops
