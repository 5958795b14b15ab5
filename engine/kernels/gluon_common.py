# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the Gluon kernels share: names that Triton 3.6 and 3.9 have apart, halves of a block, SiLU's rounding points."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_later = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def silu_mul(gate, up, DTYPE: gl.constexpr):
    """Of float32 sums of gate and up, rounded: silu(gate), rounded, times up in float32, for the caller to round. The
    rounding points are those of `triton_common.silu_mul_rounded`."""
    gate, up = gate.to(DTYPE).to(gl.float32), up.to(DTYPE).to(gl.float32)
    active = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
    return active * up


@gluon.jit
def halves(block):
    """The left and right half of a block's columns, without moving a register."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block.shape[1] // 2, 16])
    left, right = block.reshape([block.shape[0], 2, block.shape[1] // 2]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def put_boxes(out, block, DTYPE: gl.constexpr):
    """block [ROWS, columns] float32, rounded, to `out`: whole, or its right half behind the left where `out` is as wide
    as a half."""
    ROWS: gl.constexpr = block.shape[0]
    if block.shape[1] == out.shape[1]:
        out.slice(0, ROWS).store(block.to(DTYPE))
    else:
        left, right = halves(block)
        out.slice(0, ROWS).store(left.to(DTYPE))
        out.slice(ROWS, ROWS).store(right.to(DTYPE))
