"""The arithmetic a model may use, as one protocol.

Owns the names and the rounding contract of every operation between two attention calls. A model computes through an
object of this type and through nothing else, so that numerics have one owner: `PlainOps` (plain torch, the reference),
a tiled one on CPU, kernels on a GPU. Attention and the KV pool are no part of it; they sit behind `Rows`.

Shapes: N rows, K inputs, O outputs, h heads of width d. "Model dtype" is the dtype of the weights; every result has
it unless the method says otherwise. No method changes its arguments. Inputs may be strided views of a wider tensor
(the thirds of a fused QKV, the halves of a fused gate and up), outputs are contiguous.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ops(Protocol):
    """Row-wise operations; in an implementation that calls itself invariant a row's bits depend on that row alone."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, K] times weight [O, K] transposed, plus bias [O]: [N, O], accumulated wide and rounded once."""
        ...

    def gate_logit(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The exit gate: x [N, K], weight [1, K], bias [1] -> [N] float32, after one rounding to model dtype."""
        ...

    def logits(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        """The LM head: x [M, K], weight [V, K] -> [M, V] float32, after one rounding to model dtype.

        Rows from `count` [1] int32 on, a number on the device, are wanted by nobody and may hold anything.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [N, K]: float32 x * rsqrt(mean(x^2) + eps), rounded, then times weight [K], rounded again."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [N, K]: silu(gate) rounded, then its product with up rounded."""
        ...

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Split-half rotation of x [N, h, d] by cos, sin [N, d] of model dtype.

        Both products are rounded, then their sum: three roundings and no fused multiply-add.
        """
        ...

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (x[2i], x[2i + 1]) of x [N, h, d] by cos, sin [N, d / 2] float32; rounded once at the end."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a [N, ...] plus b (same shape, or a per-lane vector that broadcasts over the rows), rounded once."""
        ...

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of table [V, K] named by tokens [N] int64, times scale (one rounding): [N, K]."""
        ...

    def start_noise(self, table: Tensor, seeds: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Start states [N, width] from `table` (`noise.quantile_table`), keyed by seeds and positions [N] int64."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Sigmoid of x [N] float32, in float32 (the exit rule's p)."""
        ...
