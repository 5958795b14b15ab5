"""Nanbeige: a plain pre-norm stack with grouped-query attention, looped, the final norm closing every loop; no gate.

Owns the order of Nanbeige's operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models.base import Rows
from epicycle.engine.models.layers import Projections, Stack, attention, mlp, take_projections
from epicycle.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    projections: Projections
    before_attention: Tensor
    before_mlp: Tensor


class NanbeigeModel(Stack[Layer]):
    """See `base.LoopedModel`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], ops: Ops) -> None:
        super().__init__(spec, weights, ops, _take_layer)

    def loop(self, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        ops, eps = self._ops, self.spec.norm_eps
        turn = self.rotation(rows)
        for index, layer in enumerate(self.layers):
            normed = ops.rms_norm(state, layer.before_attention, eps)
            state = ops.add(state, attention(ops, self.spec, layer.projections, normed, index, rows, turn))
            state = ops.add(state, mlp(ops, layer.projections, ops.rms_norm(state, layer.before_mlp, eps)))
        return ops.rms_norm(state, self.norm, eps), None


def _take_layer(weights: dict[str, Tensor], prefix: str) -> Layer:
    return Layer(
        take_projections(weights, prefix),
        before_attention=weights.pop(f"{prefix}.input_layernorm.weight"),
        before_mlp=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
    )
