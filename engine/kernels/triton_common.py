# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Device functions that several kernels share, so that one value is computed by one sequence of operations.

Owns sums in an order that no layout can change, the rounding points of SiLU and of both rotations, and the host's
launch helpers. Bits must not depend on tile shape, warps or on which kernel inlines a function: sums over a row's width
are `tree_sum`s, and a product that feeds an addition is either exact, rounded first, or an explicit fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.early_start import late_reason
from epicycle.engine.kernels.candidates import EARLY_ROWS

INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def exact_sum(x, axis: tl.constexpr):
    """Sum of float32 x over `axis`, rounded once, in any order: float64 adds up float32 values exactly as long as they
    lie within 2**24 of one another, and rounds beyond where the result's last bit doesn't see it."""
    return tl.sum(x.to(tl.float64), axis=axis).to(tl.float32)


@triton.jit
def tree_sum(x, SIZE: tl.constexpr):
    """Sum of x [SIZE] float32, SIZE a power of two from 32: the same value in every layout.

    Neighbours are added in pairs up to runs of 64, which no layout spreads over more than a warp, then the runs' sums
    by `exact_sum`: halving all the way would meet a barrier for every step between warps.
    """
    folded = tl.sum(tl.reshape(x, (SIZE // 2, 2)), axis=1)
    folded = tl.sum(tl.reshape(folded, (SIZE // 4, 2)), axis=1)
    folded = tl.sum(tl.reshape(folded, (SIZE // 8, 2)), axis=1)
    folded = tl.sum(tl.reshape(folded, (SIZE // 16, 2)), axis=1)
    folded = tl.sum(tl.reshape(folded, (SIZE // 32, 2)), axis=1)
    if SIZE >= 64:
        folded = tl.sum(tl.reshape(folded, (SIZE // 64, 2)), axis=1)
    return exact_sum(folded, 0)


@triton.jit
def rounded(x, like: tl.constexpr):
    """x rounded to `like` and back to float32."""
    return x.to(like).to(tl.float32)


@triton.jit
def silu_mul_rounded(gate, up, DTYPE: tl.constexpr):
    """gate, up float32 holding values of DTYPE: silu rounded, product with up rounded; float32 out."""
    active = rounded(gate / (1.0 + tl.exp(-gate)), DTYPE)
    return rounded(active * up, DTYPE)


@triton.jit
def partner_lane(lane, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """The lane that a rotation mixes with `lane`: its neighbour, or the one half a head away."""
    if PAIRS:
        return lane ^ 1
    return tl.where(lane < HEAD_DIM // 2, lane + HEAD_DIM // 2, lane - HEAD_DIM // 2)


@triton.jit
def rotated(x, partner, cos, sin, lane, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Rotate lanes: x and partner float32 of equal shape, cos and sin broadcastable; DTYPE out.

    PAIRS: float32 arithmetic with one rounding at the end; its fused multiply-add is written out. Otherwise
    split-half: both products are rounded, then their sum.
    """
    if PAIRS:
        turned = tl.where(lane % 2 == 0, -partner, partner)
        return tl.fma(turned, sin, x * cos).to(DTYPE)
    turned = tl.where(lane < HEAD_DIM // 2, -partner, partner)
    return (rounded(x * cos, DTYPE) + rounded(turned * sin, DTYPE)).to(DTYPE)


@triton.jit
def cell_of(
    page_table_ptr, table_stride, slot, position, plane_slot, layer, slots_per_page, mask, PAGE_TOKENS: tl.constexpr
):
    """int64 cells of `position` (scalar or block): (page * slots_per_page + plane_slot + layer) * page_tokens + offset.

    plane_slot is start(plane) - first(plane). Masked positions get cells of page 0, never to be read.
    """
    page = tl.load(page_table_ptr + slot.to(tl.int64) * table_stride + position // PAGE_TOKENS, mask=mask, other=0)
    pool_slot = page.to(tl.int64) * slots_per_page + (plane_slot + layer)
    return pool_slot * PAGE_TOKENS + position % PAGE_TOKENS


@triton.jit
def pages_of(table_at, start, end, BLOCK_T: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page [BLOCK_T] of every position from `start`, 0 from `end` on, in one request's row of the page table.

    Loops ask for it one tile ahead: a load whose address is still being loaded itself can't be in flight early.
    """
    key = start + tl.arange(0, BLOCK_T)
    return tl.load(table_at + key // PAGE_TOKENS, mask=key < end, other=0)


@triton.jit
def cell_in(page, place, slots_per_page, position, PAGE_TOKENS: tl.constexpr):
    """int64 cells of `position` in `page`; place is the plane's slot plus the layer."""
    return (page.to(tl.int64) * slots_per_page + place) * PAGE_TOKENS + position % PAGE_TOKENS


def starts_early(device: torch.device, rows: int = 1) -> bool:
    """Whether a launch for `rows` rows on `device` may start while the one before it runs, as far as it reads nothing
    that is written there. A kernel that does so lets others start at once, and waits before it reads or writes anything
    but constants: every launch waits, so that what is complete for one is complete for all that follow."""
    return not INTERPRETED and device.type == "cuda" and rows <= EARLY_ROWS and not late_reason(device)


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch that may start early says so with."""
    return {"launch_pdl": True} if early else {}


def multiplies_in_groups(device: torch.device) -> bool:
    """Whether `device` has products of groups of four warps on shared memory (Hopper alone)."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent grid run side by side; a token number where there is no GPU."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def empty_product(x: Tensor, rows: int, outputs: int, epilogue: str, chunks: int) -> Tensor:
    """Room for so many rows of x times a weight of so many outputs, as `gemm_triton.product` returns it."""
    shape = (chunks, rows, outputs) if epilogue == "parts" else (rows, outputs)
    wide = torch.float32 if epilogue in ("float", "parts") else x.dtype
    return torch.empty(shape, dtype=wide, device=x.device)


def next_power(count: int) -> int:
    """The smallest power of two that is >= `count`."""
    return 1 << max(0, count - 1).bit_length()


TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
