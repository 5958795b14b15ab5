"""Pieces that both trainable architectures are made of: norm, linear initialisation, rotary tables, token loss.

Owns no model and no training state. The serving engine has its own, bit-exact versions of these; the ones here only
have to be differentiable and agree in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # each [rows, heads, tokens, head_dim], rotated


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 and rounded before the weight."""

    def __init__(self, width: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (wide * scale).to(x.dtype)


def linear(features_in: int, features_out: int, std: float) -> nn.Linear:
    """A bias-free linear layer with normal weights of the given standard deviation."""
    layer = nn.Linear(features_in, features_out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def rotary_tables(tokens: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position x frequency, each [tokens, head_dim / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * base**-exponents
    return angles.cos(), angles.sin()


def token_loss(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token in nats: states [B, S, H], head [V, H], targets [B, S] -> [B, S] float32."""
    logits = F.linear(states, head.to(states.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def head_logits(states: Tensor, head: Tensor) -> Tensor:
    """Logits in float32: states [..., H], head [V, H] -> [..., V]."""
    return F.linear(states, head.to(states.dtype)).float()


def round_to_bfloat16(module: nn.Module) -> None:
    """Round every parameter, in place, to the values a bfloat16 file keeps."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().float())
