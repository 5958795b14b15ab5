"""Rotary tables: cos and sin of every position a model has, computed once at load.

Owns the frequencies, which are recomputed in float32 and never cast (a trip through bfloat16 shifts long-context angles
for good). Tables are made on the host and copied, so that every device rotates by the same bits; a gather by position
also keeps a row's bits independent of how many rows are looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def half_tables(
    head_dim: int, theta: float, context: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [context, head_dim] in model dtype: the angles twice, for split-half rotation."""
    angles = _angles(head_dim, theta, context)
    cos, sin = (torch.cat((half, half), dim=1) for half in (angles.cos().to(dtype), angles.sin().to(dtype)))
    return cos.to(device), sin.to(device)


def pair_tables(head_dim: int, theta: float, context: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [context, head_dim / 2] float32 on the host, for rotation of adjacent pairs."""
    angles = _angles(head_dim, theta, context)
    return angles.cos(), angles.sin()


def _angles(head_dim: int, theta: float, context: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return torch.outer(torch.arange(context).float(), 1.0 / theta**exponents)
