"""What the Llama-shaped models (Ouro, Nanbeige) share: one stack's weights, and the two sublayers of a layer.

Owns the fusing of q, k, v and of gate and up at load, the order of operations inside attention and MLP, and the stages
around the loop. The loop itself, and where norms sit in it, is each model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models.base import Rows
from epicycle.engine.models.rope import half_tables
from epicycle.engine.models.spec import ModelSpec

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class Projections:
    """Matrices of one layer: qkv [(heads + 2 kv_heads) d, H], out [H, heads d], gate_up [2 I, H], down [H, I]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def take_projections(weights: dict[str, Tensor], prefix: str) -> Projections:
    """Fuse one layer's public tensors, removing them from `weights` so that both forms never coexist for a model."""
    qkv = torch.cat([weights.pop(f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv"])
    gate_up = torch.cat([weights.pop(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up")])
    out = weights.pop(f"{prefix}.self_attn.o_proj.weight")
    return Projections(qkv, out, gate_up, weights.pop(f"{prefix}.mlp.down_proj.weight"))


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of this call's rows: [N, d] of model dtype (split-half)."""

    cos: Tensor
    sin: Tensor


def attention(ops: Ops, spec: ModelSpec, w: Projections, x: Tensor, layer: int, rows: Rows, turn: Rotation) -> Tensor:
    """Self-attention of one layer on normed input [N, H], output projection included."""
    turned_heads = spec.heads + spec.kv_heads
    qkv = ops.linear(x, w.qkv).view(-1, turned_heads + spec.kv_heads, spec.head_dim)
    qk = ops.rope_half(qkv[:, :turned_heads], turn.cos, turn.sin)
    mixed = rows.attend(layer, qk[:, : spec.heads], qk[:, spec.heads :], qkv[:, turned_heads:])
    return ops.linear(mixed.flatten(1), w.out)


def mlp(ops: Ops, w: Projections, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) on normed input [N, H]."""
    gate, up = ops.linear(x, w.gate_up).chunk(2, dim=-1)
    return ops.linear(ops.silu_mul(gate, up), w.down)


class Stack(Generic[Layer]):
    """All of `base.LoopedModel` but the loop. The constructor consumes `weights` (public names, one device, one dtype);
    `take_layer` takes one layer's out of them, given its prefix.

    Weights of the loop can be read by whoever computes the same loop another way.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Tensor],
        ops: Ops,
        take_layer: Callable[[dict[str, Tensor], str], Layer],
    ) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._head = weights.pop("lm_head.weight")
        self.norm = weights.pop("model.norm.weight")
        self.layers = [take_layer(weights, f"model.layers.{index}") for index in range(spec.layers)]
        self.cos, self.sin = half_tables(
            spec.head_dim,
            spec.rope_theta,
            spec.context_tokens,
            dtype=self._head.dtype,
            device=self._head.device,
        )

    def prelude(self, tokens: Tensor, rows: Rows) -> Tensor:
        return self._ops.embed(self._embedding, tokens)

    def coda(self, state: Tensor, rows: Rows) -> Tensor:
        return state

    def head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        return self._ops.logits(x, self._head, count)

    def rotation(self, rows: Rows) -> Rotation:
        return Rotation(self.cos[rows.positions], self.sin[rows.positions])
