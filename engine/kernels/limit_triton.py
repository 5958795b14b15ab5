# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The limits of top-k and top-p of one row, searched by one program.

Owns the search and what it measures: a token's distance from the likeliest one, as float32 bits, whose order is that of
the logits, and its integer weight. Each pass over the row tallies tokens and weight within four distances at once;
what is left between two of them is soon few enough for registers. All sums are of integers, so the limits are those of
`filters.sorted_limit` as far as tokens of any weight go. It must not know what the logits went through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epicycle.engine.filters import UNIT as FILTER_UNIT

BLOCK = tl.constexpr(4096)
ROOM = tl.constexpr(4096)
"""Tokens that the end of a search holds in registers."""
UNIT = tl.constexpr(FILTER_UNIT)
# Bits of distances: the first tally's, the last of which is one beyond which no token weighs anything.
NEAR, MIDDLE, FAR = tl.constexpr(0x40000000), tl.constexpr(0x40C00000), tl.constexpr(0x41400000)  # 2, 6, 12
FARTHEST = tl.constexpr(0x41C00000)  # 24
RUN = tl.constexpr(4)  # neighbours that one thread holds
INFINITY = tl.constexpr(0x7F800000)
ENDLESS = tl.constexpr(1 << 62)
NO_LIMIT = tl.constexpr(0x7FFFFFFF)
EVEN_PASSES = tl.constexpr(6)  # that divide distances evenly; later ones divide their bits, which always ends
# A tally's sum of weights and its number of tokens share an int64: no lane sees more than 2**8 tokens.
ONE = tl.constexpr(1 << 43)
WEIGHT_MASK = tl.constexpr((1 << 43) - 1)


@triton.jit
def load_distances(at, lane, vocab):
    """int32 bits of the distances (peak - x) / temperature >= 0 at `lane`; infinity's beyond the row."""
    return tl.load(at + lane, mask=lane < vocab, other=float("inf")).to(tl.int32, bitcast=True)


@triton.jit
def drawn_weight(distance):
    """int64 share of UNIT, 0 or more, of tokens at `distance` int32 bits."""
    return (tl.exp(-distance.to(tl.float32, bitcast=True)) * UNIT).to(tl.int64)


@triton.jit
def _within(held, distance, weight, limit):
    """held [BLOCK / RUN] and the weight [BLOCK] within `limit`."""
    inside = tl.where(distance <= limit, weight, 0)
    return held + tl.sum(tl.reshape(inside, (BLOCK // RUN, RUN)), axis=1)


@triton.jit
def measure(at, to_at, lane, vocab, peak, temperature):
    """int32 bits of the distances of logits at `lane`, stored for `load_distances`."""
    x = tl.load(at + lane, mask=lane < vocab, other=float("-inf"))
    # The peak goes first, so that a tiny temperature drives the others to infinity instead of overflowing.
    distance = tl.abs(tl.div_rn(x - peak, temperature))
    tl.store(to_at + lane, distance, mask=lane < vocab)
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def _tally(logits_at, at, vocab, peak, temperature, a, b, c, d, MEASURES: tl.constexpr):
    """(int64 tokens, int64 weight) [4] within the distances a, b, c and d, which are measured first if MEASURES."""
    lane = tl.arange(0, BLOCK)
    in_a = tl.zeros([BLOCK // RUN], tl.int64)
    in_b, in_c, in_d = in_a, in_a, in_a
    for start in range(0, vocab, BLOCK):
        if MEASURES:
            distance = measure(logits_at, at, start + lane, vocab, peak, temperature)
        else:
            distance = load_distances(at, start + lane, vocab)
        weight = drawn_weight(distance) + ONE
        in_a = _within(in_a, distance, weight, a)
        in_b = _within(in_b, distance, weight, b)
        in_c = _within(in_c, distance, weight, c)
        in_d = _within(in_d, distance, weight, d)
    if MEASURES:
        tl.debug_barrier()
    tokens = _four(tl.sum(in_a >> 43), tl.sum(in_b >> 43), tl.sum(in_c >> 43), tl.sum(in_d >> 43))
    in_a, in_b, in_c, in_d = in_a & WEIGHT_MASK, in_b & WEIGHT_MASK, in_c & WEIGHT_MASK, in_d & WEIGHT_MASK
    return tokens, _four(tl.sum(in_a), tl.sum(in_b), tl.sum(in_c), tl.sum(in_d))


@triton.jit
def _four(a, b, c, d):
    lane = tl.arange(0, 4)
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def _between(low, high, quarters, even):
    """The distance so many quarters of the way from `low` to `high`, in value where `even`, else in bits."""
    first = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    value = first + (high.to(tl.float32, bitcast=True) - first) * (quarters * 0.25)
    bits = low + ((high - low).to(tl.int64) * quarters // 4).to(tl.int32)
    found = tl.where(even, value.to(tl.int32, bitcast=True), bits)
    return tl.minimum(tl.maximum(found, low), high)


@triton.jit
def _gather(at, room_at, vocab, low, high):
    """Copy the distances above `low` up to `high` to `room_at`; how many there are.

    Threads count theirs first, which tells each where to put them: a scan over threads once, and none over tokens.
    """
    lane = tl.arange(0, BLOCK)
    held = tl.zeros([BLOCK // RUN], tl.int32)
    for start in range(0, vocab, BLOCK):
        distance = load_distances(at, start + lane, vocab)
        inside = ((distance > low) & (distance <= high)).to(tl.int32)
        held += tl.sum(tl.reshape(inside, (BLOCK // RUN, RUN)), axis=1)
    place = tl.cumsum(held, axis=0) - held
    for start in range(0, vocab, BLOCK):
        distance = tl.reshape(load_distances(at, start + lane, vocab), (BLOCK // RUN, RUN))
        inside = ((distance > low) & (distance <= high)).to(tl.int32)
        to = place[:, None] + tl.cumsum(inside, axis=1) - inside
        tl.store(room_at + to, distance, mask=inside != 0)
        place += tl.sum(inside, axis=1)
    tl.debug_barrier()
    return tl.sum(held, axis=0)


@triton.jit
def _narrowed(limits, tokens, weight, by_weight, wanted, low, high, low_tokens, low_weight, high_tokens, high_weight):
    """The bounds of a search, and what lies within each, after a tally."""
    reached = tl.where(by_weight, weight, tokens) >= wanted
    low = tl.maximum(low, tl.max(tl.where(reached, -1, limits), axis=0))
    low_tokens = tl.maximum(low_tokens, tl.max(tl.where(reached, 0, tokens), axis=0))
    low_weight = tl.maximum(low_weight, tl.max(tl.where(reached, 0, weight), axis=0))
    high = tl.minimum(high, tl.min(tl.where(reached, limits, FARTHEST), axis=0))
    high_tokens = tl.minimum(high_tokens, tl.min(tl.where(reached, tokens, ENDLESS), axis=0))
    high_weight = tl.minimum(high_weight, tl.min(tl.where(reached, weight, ENDLESS), axis=0))
    return low, high, low_tokens, low_weight, high_tokens, high_weight


@triton.jit
def find_limits(logits_at, at, room_at, vocab, peak, temperature, top_k, top_p):
    """int32 distance of the last token that survives top-k and then top-p, one of which is asked for; ties with it
    survive. Leaves the row's distances at `at`.

    A search keeps low < limit <= high: `wanted` tokens or weight aren't reached within low, and are within high.
    """
    limit = tl.full([], NO_LIMIT, tl.int32)
    farthest = tl.full([], FARTHEST, tl.int32)
    nearest = tl.full([], -1, tl.int32)
    none = tl.zeros([], tl.int64)
    grid = _four(NEAR, MIDDLE, FAR, FARTHEST)
    grid_tokens, grid_weight = _tally(
        logits_at, at, vocab, peak, temperature, NEAR, MIDDLE, FAR, FARTHEST, True
    )  # fmt: skip
    total = tl.max(grid_weight, axis=0)
    found = tl.zeros([], tl.int32)  # tokens in the room
    held = nearest  # the room holds all of them up to this distance
    for by_weight in range(2):
        wanted = tl.maximum(top_k, 0)
        if by_weight > 0:
            share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            wanted = tl.where(top_p < 1.0, tl.maximum(share, 1), 0)
        if wanted > 0:
            low, high, low_tokens, low_weight, high_tokens, high_weight = _narrowed(
                grid, grid_tokens, grid_weight, by_weight > 0, wanted,
                nearest, farthest, none, none, tl.max(grid_tokens, axis=0), tl.max(grid_weight, axis=0),
            )  # fmt: skip
            if held >= 0:
                high = tl.minimum(high, limit)
            else:
                passes = 1
                while (high_tokens - low_tokens > ROOM) & (high - low > 1):
                    even = passes < EVEN_PASSES
                    a, b, c = _between(low, high, 1, even), _between(low, high, 2, even), _between(low, high, 3, even)
                    limits = _four(a, b, c, high)
                    tokens, weight = _tally(logits_at, at, vocab, peak, temperature, a, b, c, high, False)
                    low, high, low_tokens, low_weight, high_tokens, high_weight = _narrowed(
                        limits, tokens, weight, by_weight > 0, wanted,
                        low, high, low_tokens, low_weight, high_tokens, high_weight,
                    )  # fmt: skip
                    passes += 1
                if high - low > 1:
                    is_all = high_tokens <= ROOM
                    found = _gather(at, room_at, vocab, tl.where(is_all, nearest, low), high)
                    held = tl.where(is_all, high, nearest)
            if high - low > 1:
                slot = tl.arange(0, ROOM)
                distance = tl.load(room_at + slot, mask=slot < found, other=INFINITY)
                weight = drawn_weight(distance)
                value = tl.where(by_weight > 0, weight, 1)
                below = tl.where(held >= 0, 0, tl.where(by_weight > 0, low_weight, low_tokens))
                while high - low > 1:
                    middle = low + (high - low) // 2
                    reached = below + tl.sum(tl.where(distance <= middle, value, 0), axis=0) >= wanted
                    low, high = tl.where(reached, low, middle), tl.where(reached, middle, high)
                below = tl.where(held >= 0, 0, low_weight)
                high_weight = below + tl.sum(tl.where(distance <= high, weight, 0), axis=0)
            limit = tl.minimum(limit, high)
            total = high_weight
    return limit
