"""Float32 arithmetic the dense references share. Written from the papers' formulas; imports nothing of the engine."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, object]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = x @ gate.T
    return (g / (1 + torch.exp(-g)) * (x @ up.T)) @ down.T


def frequencies(width: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(0, width, 2).double() / width)


def rotate_halves(x: Tensor, theta: float) -> Tensor:
    """x [T, heads, d] at positions 0..T-1; lane i pairs with lane i + d/2."""
    count, _, width = x.shape
    angle = torch.outer(torch.arange(count).double(), frequencies(width, theta)).float()[:, None]
    a, b = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def rotate_neighbours(x: Tensor, theta: float) -> Tensor:
    """x [T, heads, d] at positions 0..T-1; lanes 2i and 2i + 1 are one complex number."""
    count, heads, width = x.shape
    angle = torch.outer(torch.arange(count).double(), frequencies(width, theta)).float()[:, None]
    turned = torch.view_as_complex(x.reshape(count, heads, -1, 2).contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.view_as_real(turned).flatten(2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads * d]."""
    count, heads, width = q.shape
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)
