"""Ouro: one stack of sandwich-norm layers, looped, with the final norm inside the loop and a trained exit gate.

Owns the order of Ouro's operations. Norms sit before AND after each sublayer; the second one norms the sublayer's
output, which is then added. The normed state feeds the next loop, the gate and the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models.base import Rows
from epicycle.engine.models.layers import Projections, Rotation, attention, mlp, take_projections
from epicycle.engine.models.rope import half_tables
from epicycle.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    projections: Projections
    before_attention: Tensor
    after_attention: Tensor
    before_mlp: Tensor
    after_mlp: Tensor


class OuroModel:
    """See `base.LoopedModel`. The constructor consumes `weights` (public names, one device, one dtype).

    Weights of the loop can be read by whoever computes the same loop another way.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = weights.pop("model.embed_tokens.weight")
        self.norm = weights.pop("model.norm.weight")
        self.gate = weights.pop("model.early_exit_gate.weight")
        self.gate_bias = weights.pop("model.early_exit_gate.bias")
        self._head = weights.pop("lm_head.weight")
        self.layers = [_take_layer(weights, f"model.layers.{index}") for index in range(spec.layers)]
        self.cos, self.sin = half_tables(
            spec.head_dim,
            spec.rope_theta,
            spec.context_tokens,
            dtype=self._head.dtype,
            device=self._head.device,
        )

    def prelude(self, tokens: Tensor, rows: Rows) -> Tensor:
        return self._ops.embed(self._embedding, tokens)

    def loop(self, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        ops, eps = self._ops, self.spec.norm_eps
        turn = Rotation(self.cos[rows.positions], self.sin[rows.positions])
        for index, layer in enumerate(self.layers):
            normed = ops.rms_norm(state, layer.before_attention, eps)
            out = attention(ops, self.spec, layer.projections, normed, index, rows, turn)
            state = ops.add(state, ops.rms_norm(out, layer.after_attention, eps))
            out = mlp(ops, layer.projections, ops.rms_norm(state, layer.before_mlp, eps))
            state = ops.add(state, ops.rms_norm(out, layer.after_mlp, eps))
        state = ops.rms_norm(state, self.norm, eps)
        return state, ops.gate_logit(state, self.gate, self.gate_bias)

    def coda(self, state: Tensor, rows: Rows) -> Tensor:
        return state

    def head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        return self._ops.logits(x, self._head, count)


def _take_layer(weights: dict[str, Tensor], prefix: str) -> Layer:
    return Layer(
        take_projections(weights, prefix),
        before_attention=weights.pop(f"{prefix}.input_layernorm.weight"),
        after_attention=weights.pop(f"{prefix}.input_layernorm_2.weight"),
        before_mlp=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
        after_mlp=weights.pop(f"{prefix}.post_attention_layernorm_2.weight"),
    )
