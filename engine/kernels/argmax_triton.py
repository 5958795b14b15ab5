# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The likeliest token of each row, lowest id on ties, for batches in which nobody asks for anything else.

Owns one kernel over float32 logits that may read its row count from the device. A row with a value that isn't finite is
reported so; its token then means nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(16384)  # few long steps: each waits for memory once


@triton.jit
def argmax_kernel(logits_ptr, token_ptr, finite_ptr, count_ptr, stride, vocab, HAS_COUNT: tl.constexpr):
    """Grid (rows). A block's best beats an earlier one only when it is greater, so the lowest id wins."""
    row = tl.program_id(0).to(tl.int64)
    live = row + 1
    if HAS_COUNT:
        live = tl.load(count_ptr).to(tl.int64)
    if row >= live:
        return
    best = float("-inf")
    token = 0
    bad = 0
    for start in range(0, vocab, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + lane, mask=lane < vocab, other=float("-inf"))
        bad += tl.sum(((lane < vocab) & ~(tl.abs(x) < float("inf"))).to(tl.int32), axis=0)
        high = tl.max(x, axis=0)
        found = tl.min(tl.where(x == high, lane, vocab), axis=0)
        token = tl.where(high > best, found, token)
        best = tl.maximum(best, high)
    tl.store(token_ptr + row, token)
    tl.store(finite_ptr + row, bad == 0)


def argmax(logits: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [M, V] float32 -> (tokens [M] int64, is_finite [M] int8); rows from `count` [1] int32 on are unwritten."""
    rows, vocab = logits.shape
    tokens = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    finite = torch.zeros(rows, dtype=torch.int8, device=logits.device)
    argmax_kernel[(rows,)](
        logits,
        tokens,
        finite,
        logits if count is None else count,
        logits.stride(0),
        vocab,
        HAS_COUNT=count is not None,
        enable_fp_fusion=True,
        num_warps=16,
    )
    return tokens, finite
