"""Float32 arithmetic whose bits depend on the row alone.

Owns the two tricks the rules need: elementwise functions on a width that has no vector tail, and sums in a fixed order
of additions. On a CPU a library's sigmoid differs in bits between vector body and scalar tail, and its reductions and
products follow the shape of the whole call; plain additions and multiplications are exact to the standard and do not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

_VECTOR_LANES: Final = 32


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoid of x (any shape) float32, computed on a flat padded copy."""
    flat = x.reshape(-1)
    padded = pad(flat, (0, -flat.numel() % _VECTOR_LANES))
    return torch.sigmoid(padded)[: flat.numel()].reshape(x.shape)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis by halving, the width filled up with zeros to a power of two."""
    width = x.shape[-1]
    size = 1 << (width - 1).bit_length()
    x = pad(x, (0, size - width))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [N, K] times weight [O, K] transposed plus bias [O], float32. For small heads: N x O x K products."""
    return tree_sum(x.unsqueeze(1) * weight) + bias


def host_tree_sum(x: npt.NDArray[np.float32]) -> np.float32:
    """`tree_sum` of one vector on the host, for oracles."""
    size = 1 << (len(x) - 1).bit_length()
    x = np.concatenate([x, np.zeros(size - len(x), np.float32)])
    while size > 1:
        size //= 2
        x = x[:size] + x[size:]
    return np.float32(x[0])
