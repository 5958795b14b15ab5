"""Exit rule `lookahead`: a small trained head predicts the next loop's gate, so the last loop is named one ahead.

After loop k, with the true gate logits of loops 1..k and the head's logit z of loop k + 1 (T loops in all):

    R_k  = R_{k-1} * (1 - sigmoid(g_k))                       true hazards of the loops already run
    F^   = 1 - R_k * (1 - sigmoid(z_{k+1}))                   what F is expected to be after loop k + 1
    name loop k + 1 as the last when threshold < 1 and F^ >= threshold and k + 1 >= min_loops

so a row leaves at k + 1 (at 2 at the earliest, `max_loops` at the latest) and whoever plans loop k + 2 knows its rows
before loop k + 1 has run. Once a loop is named the true gate of that loop no longer matters.

Head, all float32: z = fc2(silu(fc1([a * x, b * y]) + step[t])) with x the state before loop t + 1 (t = k), y the final
state of the previous token, (a, b) = in_scale; entry t of its T outputs is loop t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from epicycle.engine.errors import LoadError
from epicycle.engine.exits.base import ExitDecision, ExitRows, leave_next
from epicycle.engine.exits.numerics import linear, sigmoid, tree_sum
from epicycle.engine.exits.ouro import survive
from epicycle.engine.exits.registry import RuleSetup


@dataclass(frozen=True, slots=True)
class LookaheadHead:
    """Weights in float32: H hidden size, n inner width, T loops."""

    scale: Tensor  # [2]
    inner: Tensor  # [n, 2 H]
    inner_bias: Tensor  # [n]
    step: Tensor  # [T, n]
    outer: Tensor  # [T, n]
    outer_bias: Tensor  # [T]

    def next_gate(self, state: Tensor, previous_final: Tensor, loops_done: Tensor) -> Tensor:
        """[N] float32: the predicted gate logit of loop `loops_done` + 1, from states [N, H] (wider ones are cut)."""
        hidden_size = self.inner.shape[1] // 2
        # Past the last loop nothing is left to predict; the row leaves at its maximum whatever comes out.
        step = loops_done.clamp(max=self.step.shape[0] - 1)
        x = state[:, :hidden_size].float() * self.scale[0]
        y = previous_final[:, :hidden_size].float() * self.scale[1]
        inner = linear(torch.cat((x, y), dim=-1), self.inner, self.inner_bias) + self.step[step]
        return tree_sum(inner * sigmoid(inner) * self.outer[step]) + self.outer_bias[step]


class Lookahead:
    def __init__(self, head: LookaheadHead) -> None:
        self.head = head

    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        assert setup.lookahead_path is not None
        return cls(load_head(setup.lookahead_path, setup.hidden_size, setup.loops, setup.device))

    def decide(self, rows: ExitRows) -> ExitDecision:
        assert rows.previous_final is not None
        survival = survive(rows)
        predicted = sigmoid(self.head.next_gate(rows.state_after, rows.previous_final, rows.loops_done))
        reached = 1.0 - survival * (1.0 - predicted) >= rows.threshold
        return leave_next(rows, reached, rows.loops_done + 1, survival)


def load_head(path: Path, hidden_size: int, loops: int, device: str) -> LookaheadHead:
    """Read and check `lookahead.safetensors`. Raises `LoadError` naming the file and the tensor."""
    try:
        tensors = load_file(path, device=device)
    except (OSError, SafetensorError) as error:
        raise LoadError("missing_weights", f"{path} can't be read as the lookahead head's weights: {error}") from error
    width = tensors["fc1.bias"].numel() if "fc1.bias" in tensors else 0
    shapes = {
        "in_scale": (2,),
        "fc1.weight": (width, 2 * hidden_size),
        "fc1.bias": (width,),
        "step_embed.weight": (loops, width),
        "fc2.weight": (loops, width),
        "fc2.bias": (loops,),
    }
    for name in sorted(shapes.keys() - tensors.keys()):
        raise LoadError("missing_tensor", f"{path} has no tensor {name!r}")
    for name in sorted(tensors.keys() - shapes.keys()):
        raise LoadError("unknown_tensor", f"{path} has a tensor {name!r} that a lookahead head doesn't")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise LoadError("wrong_shape", f"{path}: {name!r} is {list(tensors[name].shape)}, expected {list(shape)}")
    return LookaheadHead(*(tensors[name].float() for name in shapes))


def oracle(
    hazards: Sequence[float], predicted: Sequence[float], threshold: float, min_loops: int, max_loops: int
) -> int:
    """The exit depth of one token on the host; predicted[k - 1] is the hazard foretold after loop k, of loop k + 1."""
    one, survival, limit = np.float32(1), np.float32(1), np.float32(threshold)
    for k in range(1, max_loops):
        survival = survival * (one - np.float32(hazards[k - 1]))
        expected = one - survival * (one - np.float32(predicted[k - 1]))
        if limit < one and expected >= limit and k + 1 >= min_loops:
            return k + 1
    return max_loops
