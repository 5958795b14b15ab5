"""Nanbeige: a plain pre-norm stack with grouped-query attention, looped, the final norm closing every loop; no gate.

Owns the order of Nanbeige's operations.
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
class _Layer:
    projections: Projections
    before_attention: Tensor
    before_mlp: Tensor


class NanbeigeModel:
    """See `base.LoopedModel`. The constructor consumes `weights` (public names, one device, one dtype)."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._norm = weights.pop("model.norm.weight")
        self._head = weights.pop("lm_head.weight")
        self._layers = [_take_layer(weights, f"model.layers.{index}") for index in range(spec.layers)]
        self._cos, self._sin = half_tables(
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
        turn = Rotation(self._cos[rows.positions], self._sin[rows.positions])
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(state, layer.before_attention, eps)
            state = ops.add(state, attention(ops, self.spec, layer.projections, normed, index, rows, turn))
            state = ops.add(state, mlp(ops, layer.projections, ops.rms_norm(state, layer.before_mlp, eps)))
        return ops.rms_norm(state, self._norm, eps), None

    def coda(self, state: Tensor, rows: Rows) -> Tensor:
        return state

    def head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        return self._ops.logits(x, self._head, count)


def _take_layer(weights: dict[str, Tensor], prefix: str) -> _Layer:
    return _Layer(
        take_projections(weights, prefix),
        before_attention=weights.pop(f"{prefix}.input_layernorm.weight"),
        before_mlp=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
    )
