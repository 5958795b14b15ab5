# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""silu(gate) * up as a kernel of its own, for products whose implementation can't do it in its epilogue.

Owns nothing but the launch; the two roundings are `triton_common.silu_mul_rounded`, as in the epilogue. The torch twin
is `plain.PlainOps.silu_mul`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import TL_DTYPES, silu_mul_rounded

BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, BLOCK_W: tl.constexpr, DTYPE: tl.constexpr
):
    """Grid (rows, blocks of the width); out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = lane < width
    gate = tl.load(gate_ptr + row * gate_stride + lane, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + lane, silu_mul_rounded(gate, up, DTYPE).to(DTYPE), mask=mask)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate, up [N, K] (rows may be strided) -> [N, K] contiguous."""
    rows, width = gate.shape
    assert gate.stride(1) == up.stride(1) == 1, (gate.stride(), up.stride())
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device) if out is None else out
    silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        width,
        BLOCK_W=BLOCK,
        DTYPE=TL_DTYPES[gate.dtype],
        enable_fp_fusion=True,
        num_warps=4,
    )
    return out
