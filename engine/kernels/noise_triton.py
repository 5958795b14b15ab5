# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Start-state noise on the GPU: the same integer steps as `noise.draw`, one launch for a traversal's rows.

Owns the kernel only; constants and the table are `noise`'s, and the bits are equal to its own by construction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels import noise
from epicycle.engine.kernels.triton_common import TL_DTYPES

BLOCK = 1024
SEED_STEP = tl.constexpr(noise.SEED_STEP)
POSITION_STEP = tl.constexpr(noise.POSITION_STEP)
LANE_STEP = tl.constexpr(noise.LANE_STEP)
MIX_A = tl.constexpr(noise.MIX_A)
MIX_B = tl.constexpr(noise.MIX_B)
TABLE_BITS = tl.constexpr(noise.TABLE_BITS)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * MIX_A
    x = (x ^ _shift_right(x, 27)) * MIX_B
    return x ^ _shift_right(x, 31)


@triton.jit
def noise_kernel(
    table_ptr, seeds_ptr, positions_ptr, out_ptr, out_stride, width, BLOCK_W: tl.constexpr, DTYPE: tl.constexpr
):
    """Grid (rows, blocks of the width). seeds and positions int64."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    # Blocks, not scalars, so that 64-bit products wrap without a word in the interpreter too.
    start = tl.zeros((BLOCK_W,), tl.int64)
    key = _mix(start + tl.load(seeds_ptr + row + start) * SEED_STEP)
    key = _mix(key + tl.load(positions_ptr + row + start) * POSITION_STEP)
    words = _mix(key + (lane.to(tl.int64) + 1) * LANE_STEP)
    value = tl.load(table_ptr + _shift_right(words, 64 - TABLE_BITS))
    tl.store(out_ptr + row * out_stride + lane, value.to(DTYPE), mask=lane < width)


def draw(
    table: Tensor, seeds: Tensor, positions: Tensor, width: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """[N, width] of `dtype` for rows with seeds and positions [N] int64; `table` is `noise.quantile_table`'s."""
    rows, seeds, positions = seeds.shape[0], seeds.contiguous(), positions.contiguous()
    out = torch.empty(rows, width, dtype=dtype, device=seeds.device) if out is None else out
    noise_kernel[(rows, triton.cdiv(width, BLOCK))](
        table, seeds, positions, out, out.stride(0), width,
        BLOCK_W=BLOCK, DTYPE=TL_DTYPES[dtype], enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out
