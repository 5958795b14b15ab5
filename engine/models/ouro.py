"""Ouro: one stack of sandwich-norm layers, looped, with the final norm inside the loop and a trained exit gate.

Owns the order of Ouro's operations. Norms sit before AND after each sublayer; the second one norms the sublayer's
output, which is then added. The normed state feeds the next loop, the gate and the LM head.
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
    after_attention: Tensor
    before_mlp: Tensor
    after_mlp: Tensor


class OuroModel(Stack[Layer]):
    """See `base.LoopedModel`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], ops: Ops) -> None:
        super().__init__(spec, weights, ops, _take_layer)
        self.gate = weights.pop("model.early_exit_gate.weight")
        self.gate_bias = weights.pop("model.early_exit_gate.bias")

    def loop(self, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        ops, eps = self._ops, self.spec.norm_eps
        turn = self.rotation(rows)
        for index, layer in enumerate(self.layers):
            normed = ops.rms_norm(state, layer.before_attention, eps)
            out = attention(ops, self.spec, layer.projections, normed, index, rows, turn)
            state = ops.add(state, ops.rms_norm(out, layer.after_attention, eps))
            out = mlp(ops, layer.projections, ops.rms_norm(state, layer.before_mlp, eps))
            state = ops.add(state, ops.rms_norm(out, layer.after_mlp, eps))
        state = ops.rms_norm(state, self.norm, eps)
        return state, ops.gate_logit(state, self.gate, self.gate_bias)


def _take_layer(weights: dict[str, Tensor], prefix: str) -> Layer:
    return Layer(
        take_projections(weights, prefix),
        before_attention=weights.pop(f"{prefix}.input_layernorm.weight"),
        after_attention=weights.pop(f"{prefix}.input_layernorm_2.weight"),
        before_mlp=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
        after_mlp=weights.pop(f"{prefix}.post_attention_layernorm_2.weight"),
    )
