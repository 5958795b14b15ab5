"""What the Llama-shaped models (Ouro, Nanbeige) share: fused weights of one layer and its two sublayers.

Owns the fusing of q, k, v and of gate and up at load, and the order of operations inside attention and MLP. Where
norms sit around them is each model's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models.base import Rows
from epicycle.engine.models.spec import ModelSpec


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
