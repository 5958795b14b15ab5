# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Device functions that several kernels share, so that one value is computed by one sequence of operations.

Owns sums in an order that no layout can change, the rounding points of SiLU and of both rotations, and the host's
launch helpers. Bits must not depend on tile shape, warps or on which kernel inlines a function: sums over a row's width
are `tree_sum`s, and a product that feeds an addition is either exact, rounded first, or an explicit fused multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
PREFETCH_BLOCK = 16384
PREFETCH_BYTES = 4 * PREFETCH_BLOCK  # one program's share


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


@triton.jit
def prefetch_share(ptr, share, size_bytes):
    """Ask for the `share`-th PREFETCH_BYTES of `size_bytes` at ptr to be brought into the L2 cache. Waits for nothing.

    For weights that a later launch reads, from programs that leave memory idle. Shares beyond the end do nothing;
    `size_bytes` is 0 or at least one block of 16 KiB.
    """
    first = share.to(tl.int64) * 65536
    if first < size_bytes:
        # One request for each warp, by its first lane: every lane that runs the instruction makes a request.
        block = tl.arange(0, 128).to(tl.int64) // 32
        # Blocks beyond the end ask for the last one again, which costs nothing.
        at = ptr.to(tl.int64) + tl.minimum(first + block * 16384, size_bytes.to(tl.int64) - 16384)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
            "@p cp.async.bulk.prefetch.L2.global [$1], 16384; mov.u32 $0, 0; }",
            "=r,l",
            [at],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a launch on `device` may start while the one before it runs, as far as it reads nothing that is written
    there. A kernel that does so lets others start at once, and waits before it reads or writes anything but constants:
    every launch waits, so that what is complete for one is complete for all that follow."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch that may start early says so with."""
    return {"launch_pdl": True} if early else {}


@dataclass(frozen=True, slots=True)
class Ahead:
    """A weight that a later launch reads, or a part of it: the first `most_bytes` of `weight` (contiguous) are brought
    into the L2 cache by a kernel that is handed this, unless it is interpreted."""

    weight: Tensor
    most_bytes: int = 12 << 20  # about three microseconds of memory traffic

    @property
    def size_bytes(self) -> int:
        """Whole blocks; none in the interpreter, which has no caches."""
        size = min(self.weight.numel() * self.weight.element_size(), self.most_bytes)
        return 0 if INTERPRETED else size // PREFETCH_BLOCK * PREFETCH_BLOCK

    @property
    def programs(self) -> int:
        """How many shares that is."""
        return -(-self.size_bytes // PREFETCH_BYTES)


def ahead_bytes(ahead: Ahead | None) -> int:
    """What a kernel is told to fetch; 0 for nothing."""
    return 0 if ahead is None else ahead.size_bytes


def multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent grid run side by side; a token number where there is no GPU."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power(count: int) -> int:
    """The smallest power of two that is >= `count`."""
    return 1 << max(0, count - 1).bit_length()


TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
