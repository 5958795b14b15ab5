# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Adding up what the pieces of a decode row's history have left, for a program of any number of threads.

Owns the order of those sums and how few waits they take. Where the pieces are, and who adds them up, is
`decode_attention_triton`'s. The kernel for a lone row has a form of its own, in tiles (`early_decode_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(8)  # pieces of one block; blocks of 16 take compilers three times as long


@triton.jit
def _asked(sums_at, stats_at, start, pieces, lane, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Of AT_ONCE pieces from `start` of one head, all on their way: highest scores, sums of weights and of values.
    Every thread has them all for its lanes, so that nobody waits for another."""
    tops, totals, sums = (), (), ()  # tuples grow in place while this is unrolled
    for one in tl.static_range(AT_ONCE):
        place = HEADS * (start + one)
        there = lane < tl.where(pieces > start + one, lane.shape[0], 0)
        at = stats_at + (2 * place + 0 * lane)
        tops += (tl.load(at, mask=there, other=float("-inf")),)  # type: ignore[assignment]
        totals += (tl.load(at + 1, mask=there, other=0.0),)  # type: ignore[assignment]
        values = tl.load(sums_at + (place * HEAD_DIM + lane), mask=there & (lane < HEAD_DIM), other=0.0)
        sums += (values,)  # type: ignore[assignment]
    return tops, totals, sums


@triton.jit
def _added(total, mixed, asked, highest):
    """`total` and `mixed` with those pieces, one after the other."""
    tops, totals, sums = asked
    for one in tl.static_range(AT_ONCE):
        scale = tl.exp2(tops[one] - highest).to(tl.float64)
        total += scale * totals[one]
        mixed += scale * sums[one]
    return total, mixed


@triton.jit
def combine_pieces(
    sums_ptr, stats_ptr, out_at, first, pieces, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add up places first .. first + pieces of one head into `out_at`, piece by piece. Two blocks of them are asked for
    before any is waited for.

    In float64, whose sums of float32 products round where no result sees it: the order and the fused multiply-adds of
    a float32 sum would be the layout's, which the compiler picks, and another kernel's would be others.
    """
    lane = tl.arange(0, BLOCK_D)
    begin = first.to(tl.int64) * HEADS + head
    sums_at, stats_at = sums_ptr + begin * HEAD_DIM, stats_ptr + 2 * begin
    asked = _asked(sums_at, stats_at, 0, pieces, lane, HEADS, HEAD_DIM)
    second = asked
    if pieces > AT_ONCE:
        second = _asked(sums_at, stats_at, AT_ONCE, pieces, lane, HEADS, HEAD_DIM)
    highest = tl.maximum(asked[0][0], second[0][0])
    for one in tl.static_range(1, AT_ONCE):
        highest = tl.maximum(tl.maximum(highest, asked[0][one]), second[0][one])
    for start in range(2 * AT_ONCE, pieces, AT_ONCE):
        for one in tl.static_range(AT_ONCE):
            there = lane < tl.where(pieces > start + one, BLOCK_D, 0)
            at = stats_at + (2 * HEADS * (start + one) + 0 * lane)
            highest = tl.maximum(highest, tl.load(at, mask=there, other=float("-inf")))
    nothing = tl.zeros((BLOCK_D,), tl.float64)
    total, mixed = _added(nothing, nothing, asked, highest)
    if pieces > AT_ONCE:
        total, mixed = _added(total, mixed, second, highest)
    for start in range(2 * AT_ONCE, pieces, AT_ONCE):
        following = _asked(sums_at, stats_at, start, pieces, lane, HEADS, HEAD_DIM)
        total, mixed = _added(total, mixed, following, highest)
    share = mixed.to(tl.float32) / total.to(tl.float32)
    tl.store(out_at + lane, share.to(DTYPE), mask=lane < HEAD_DIM)
