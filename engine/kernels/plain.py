"""`PlainOps`: the operations of `ops.Ops` as plain torch expressions.

Owns the reference rounding points: every kernel is tested against this file, and float32 runs of it are the reference
of everything else. It promises nothing about a row's bits when the number of rows changes. It knows no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epicycle.engine.kernels import noise


class PlainOps:
    """Stateless; one object serves any number of models. Rounding per method is stated in `ops.Ops`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def gate_logit(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).squeeze(-1).float()

    def logits(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        return F.linear(x, weight).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        real, imag = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = torch.stack((real * c - imag * s, imag * c + real * s), dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(tokens, table)
        return rows if scale == 1.0 else rows * scale

    def start_noise(self, table: Tensor, seeds: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return noise.draw(table, seeds, positions, width).to(dtype)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)
