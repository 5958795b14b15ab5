# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""RMSNorm and what stands beside it between two products: sums of split products, residuals, the next norm, the gate.

Owns one kernel for all of them, one program a row, with the rounding points of `ops.Ops.rms_norm`: float32 inside,
rounded, times weight, rounded. Sums over the width are `tree_sum`s, so a row's bits depend on nothing else. Stages:

    NORM      x = norm(h, before)
    SANDWICH  h' = h + norm(a, after);  x = norm(h', before)     the norm is of the sublayer's output
    SUM       h' = norm(a + h, after);  x = norm(h', before)     the norm is of the sum

`a` is a product's result, or float32 parts [P, N, K] that are added in order and rounded here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.triton_common import (
    TL_DTYPES,
    launch_options,
    next_power,
    rounded,
    starts_early,
    tree_sum,
)

NORM = tl.constexpr(0)
SANDWICH = tl.constexpr(1)
SUM = tl.constexpr(2)
STAGES = {"norm": 0, "sandwich": 1, "sum": 2}


@triton.jit
def normed(x, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """One row: x, weight [BLOCK] float32 (values of DTYPE, zero beyond WIDTH) -> float32 holding values of DTYPE."""
    scale = tl.rsqrt(tree_sum(x * x, BLOCK) / WIDTH + eps)
    return rounded(rounded(x * scale, DTYPE) * weight, DTYPE)


@triton.jit
def sum_parts(a_ptr, row, lane, mask, stride, part_stride, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Row `row` of a product: float32 parts added in order and rounded, or the stored value where PARTS is 0."""
    at = a_ptr + row.to(tl.int64) * stride + lane
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_stride, mask=mask, other=0.0)
    return rounded(total, DTYPE)


@triton.jit
def norm_kernel(
    a_ptr, h_ptr, after_ptr, before_ptr, h_out_ptr, x_out_ptr,
    a_stride, part_stride, h_stride, h_out_stride, x_out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGE: tl.constexpr, PARTS: tl.constexpr,
    HAS_NEXT: tl.constexpr, EARLY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (rows). h_out may be h. Without HAS_NEXT there is no last norm and no x."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < WIDTH
    # Both are always there to be read; a stage that has no use for one has its load dropped by the compiler.
    after = tl.load(after_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(before_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    h = tl.load(h_ptr + row.to(tl.int64) * h_stride + lane, mask=mask, other=0.0).to(tl.float32)
    if STAGE != NORM:
        a = sum_parts(a_ptr, row, lane, mask, a_stride, part_stride, PARTS, DTYPE)
        if STAGE == SANDWICH:
            h = rounded(h + normed(a, after, eps, WIDTH, BLOCK, DTYPE), DTYPE)
        else:
            h = normed(rounded(a + h, DTYPE), after, eps, WIDTH, BLOCK, DTYPE)
        tl.store(h_out_ptr + row.to(tl.int64) * h_out_stride + lane, h.to(DTYPE), mask=mask)
    if HAS_NEXT:
        x = normed(h, before, eps, WIDTH, BLOCK, DTYPE)
        tl.store(x_out_ptr + row.to(tl.int64) * x_out_stride + lane, x.to(DTYPE), mask=mask)


@triton.jit
def gate_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """Grid (rows): out [N] float32 = x . weight + bias, rounded once to DTYPE."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mask = lane < WIDTH
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + lane, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    logit = tree_sum(x * weight, BLOCK) + tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + row, rounded(logit, DTYPE))


def _warps(block: int) -> int:
    return 8 if block > 2048 else 4


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Stage NORM: x [N, K] (rows may be strided) -> [N, K]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch("norm", x, x, weight, weight, x, out, eps)
    return out


def norm_after(
    stage: str,
    a: Tensor,
    h: Tensor,
    after: Tensor,
    before: Tensor | None,
    eps: float,
    *,
    h_out: Tensor | None = None,
    x_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Stage "sandwich" or "sum": a [N, K] of h's dtype or float32 parts [P, N, K], h [N, K] -> (h', x).

    Without `before` x is h'. `h_out` may be `h`, then h changes in place; otherwise nothing given is changed.
    """
    h_out = torch.empty(h.shape, dtype=h.dtype, device=h.device) if h_out is None else h_out
    early = starts_early(h.device, len(h))
    if before is None:
        _launch(stage, a, h, after, after, h_out, None, eps, early=early)
        return h_out, h_out
    x_out = torch.empty(h.shape, dtype=h.dtype, device=h.device) if x_out is None else x_out
    _launch(stage, a, h, after, before, h_out, x_out, eps, early=early)
    return h_out, x_out


def _launch(
    stage: str,
    a: Tensor,
    h: Tensor,
    after: Tensor,
    before: Tensor,
    h_out: Tensor,
    x_out: Tensor | None,
    eps: float,
    *,
    early: bool = False,
) -> None:
    (rows, width), block = h.shape, next_power(h.shape[1])
    assert h.stride(1) == a.stride(-1) == h_out.stride(1) == 1, (h.stride(), a.stride())
    norm_kernel[(rows,)](
        a,
        h,
        after,
        before,
        h_out,
        h_out if x_out is None else x_out,
        a.stride(-2),
        a.stride(0),
        h.stride(0),
        h_out.stride(0),
        0 if x_out is None else x_out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        STAGE=STAGES[stage],
        PARTS=a.shape[0] if a.ndim == 3 else 0,
        HAS_NEXT=x_out is not None,
        EARLY=early,
        DTYPE=TL_DTYPES[h.dtype],
        enable_fp_fusion=True,
        num_warps=_warps(block),
        **launch_options(early),
    )


def gate_logit(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [N, K], weight [1, K], bias [1] -> [N] float32 after one rounding to x's dtype."""
    (rows, width), block = x.shape, next_power(x.shape[1])
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    gate_kernel[(rows,)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        DTYPE=TL_DTYPES[x.dtype],
        enable_fp_fusion=True,
        num_warps=_warps(block),
    )
    return out


def plain_norm_after(
    stage: str, a: Tensor, h: Tensor, after: Tensor, before: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The torch twin of `norm_after`."""
    ops = PlainOps()
    if a.ndim == 3:
        total = a[0]
        for part in a[1:]:
            total = total + part
        a = total.to(h.dtype)
    h = h + ops.rms_norm(a, after, eps) if stage == "sandwich" else ops.rms_norm(a + h, after, eps)
    return h, h if before is None else ops.rms_norm(h, before, eps)
