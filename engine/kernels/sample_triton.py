# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sampler of a device tick in one launch: a program for each row that is due a token, nothing for the others.

Owns what `engine.sampler` does with torch, which is its twin: edits, temperature, filters, the draw, logprobs, and the
new token's count. Weights and limits are the twin's integers, whose sums are exact in any order, so a row's bits depend
on its own logits and columns alone. It must not know how a row came to be due.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine import sampling
from epicycle.engine.filters import UNIT as FILTER_UNIT
from epicycle.engine.kernels.limit_triton import (
    BLOCK,
    NO_LIMIT,
    ROOM,
    drawn_weight,
    find_limits,
    load_distances,
    measure,
)
from epicycle.engine.kernels.triton_common import next_power
from epicycle.engine.logprobs import MAX_VOCAB
from epicycle.engine.logprobs import UNIT as LOGPROB_UNIT
from epicycle.engine.sampling import MAX_ALTERNATIVES, SlotSampling

WARPS = 16
TEMPERATURE, TOP_P, MIN_P = (tl.constexpr(at) for at in (sampling.TEMPERATURE, sampling.TOP_P, sampling.MIN_P))
REPETITION, PRESENCE = tl.constexpr(sampling.REPETITION), tl.constexpr(sampling.PRESENCE)
FREQUENCY, REALS = tl.constexpr(sampling.FREQUENCY), tl.constexpr(sampling.REALS)
TOP_K, SEED, CHOICE = (tl.constexpr(at) for at in (sampling.TOP_K, sampling.SEED, sampling.CHOICE))
MIN_TOKENS, ALTERNATIVES = tl.constexpr(sampling.MIN_TOKENS), tl.constexpr(sampling.ALTERNATIVES)
INTEGERS = tl.constexpr(sampling.INTEGERS)
DRAW_UNIT, REPORT_UNIT = tl.constexpr(FILTER_UNIT), tl.constexpr(LOGPROB_UNIT)
WIDTH = tl.constexpr(MAX_ALTERNATIVES)
PLACES = tl.constexpr(next_power(MAX_ALTERNATIVES))
MOST_BLOCKS = tl.constexpr(MAX_VOCAB // BLOCK.value)
COPIED = tl.constexpr(2048)  # four a thread, also of bytes: stores of float32 take no more
ID_MASK = tl.constexpr(0xFFFFFFFF)
LAST_BIT = tl.constexpr(2.0**-53)
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _likeliest(at, vocab):
    """(value, lowest id that has it, whether a token can be told from it) of a row of logits."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(at + start + lane, mask=start + lane < vocab, other=float("-inf"))
        broken |= (x != x).to(tl.int32)
        first = tl.where(x > best, start, first)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, first + lane, vocab), axis=0)
    whole = (tl.max(broken, axis=0) == 0) & (tl.abs(peak) < float("inf"))
    return peak, token, whole


@triton.jit
def _penalised_copy(from_at, to_at, vocab, reals, counts_at, seen_at, PENALISES: tl.constexpr):
    """Copy a row of logits, where PENALISES as `penalties.penalise` changes it."""
    repetition = tl.load(reals + REPETITION)
    presence = tl.load(reals + PRESENCE)
    frequency = tl.load(reals + FREQUENCY)
    for start in range(0, vocab, COPIED):
        lane = start + tl.arange(0, COPIED)
        mask = lane < vocab
        x = tl.load(from_at + lane, mask=mask, other=0.0)
        if PENALISES:
            count = tl.load(counts_at + lane, mask=mask, other=0).to(tl.float32)
            said = count > 0
            seen = (tl.load(seen_at + lane, mask=mask, other=0) != 0) | said
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(seen, repeated, x)
            x = x - frequency * count
            x = x - presence * said.to(tl.float32)
        tl.store(to_at + lane, x, mask=mask)


@triton.jit
def _edit(
    from_at, to_at, vocab, reals, counts_at, seen_at, penalises, biased, values_at, biases, held, BLOCK_B: tl.constexpr
):
    """Copy a row of logits with penalties, then biases on ids `biased` [BLOCK_B], then without ids `held`; ids that pad
    a list are V."""
    if penalises:
        _penalised_copy(from_at, to_at, vocab, reals, counts_at, seen_at, True)
    else:
        _penalised_copy(from_at, to_at, vocab, reals, counts_at, seen_at, False)
    tl.debug_barrier()
    place = tl.arange(0, BLOCK_B)
    x = tl.load(to_at + biased, mask=biased < vocab, other=0.0)
    x += tl.load(values_at + place, mask=place < biases, other=0.0)
    tl.store(to_at + biased, x, mask=biased < vocab)
    tl.debug_barrier()
    tl.store(to_at + held, float("-inf"), mask=held < vocab)
    tl.debug_barrier()


@triton.jit
def _log_total(at, vocab, peak):
    """float64 log of the sum of exp(x - peak), as `logprobs` has it."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        x = tl.load(at + start + lane, mask=start + lane < vocab, other=float("-inf"))
        total += (tl.exp(x - peak) * REPORT_UNIT).to(tl.int64)
    return tl.log(tl.sum(total, axis=0).to(tl.float64) / REPORT_UNIT)


@triton.jit
def _ordered(x, lane):
    """int64 in the order of float32 x, lower lanes first on ties: no two are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (ID_MASK - lane.to(tl.int64))


@triton.jit
def _report(at, ids_at, shares_at, vocab, wanted, peak, log_total):
    """The `wanted` likeliest ids and their logprobs; -1 and -inf beyond.

    Every lane holds the best of its own strided column; only the column that was taken from is read again.
    """
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.int64)
    for start in range(0, vocab, BLOCK):
        x = tl.load(at + start + lane, mask=start + lane < vocab, other=0.0)
        best = tl.where(start + lane < vocab, tl.maximum(best, _ordered(x, start + lane)), best)
    place = tl.arange(0, PLACES)
    ids = tl.full([PLACES], -1, tl.int64)
    for number in range(tl.minimum(wanted, vocab)):
        key = tl.max(best, axis=0)
        taken = ID_MASK - (key & ID_MASK)
        ids = tl.where(place == number, taken, ids)
        column = taken % BLOCK + tl.arange(0, MOST_BLOCKS) * BLOCK
        x = tl.load(at + column, mask=column < vocab, other=0.0)
        keys = _ordered(x, column)
        following = tl.max(tl.where((column < vocab) & (keys < key), keys, LOWEST), axis=0)
        best = tl.where(lane == taken % BLOCK, following, best)
    x = tl.load(at + ids, mask=ids >= 0, other=float("-inf"))
    tl.store(ids_at + place, ids, mask=place < WIDTH)
    tl.store(shares_at + place, ((x - peak).to(tl.float64) - log_total).to(tl.float32), mask=place < WIDTH)


@triton.jit
def _uniform(seed, position, choice):
    """float64 in [0, 1), as `rng.uniform` has it."""
    none = tl.zeros([1], tl.int32)
    first, second, _, _ = tl.philox(seed, none, none + position.to(tl.int32), none + choice.to(tl.int32), none)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return tl.sum(bits, axis=0).to(tl.float64) * LAST_BIT


@triton.jit
def _survivors(at, lane, vocab, limit, least):
    """int64 weights, 0 for what the filters exclude."""
    distance = load_distances(at, lane, vocab)
    weight = drawn_weight(distance)
    return tl.where((distance <= limit) & (weight >= least), weight, 0)


@triton.jit
def _draw(at, sums_at, vocab, limit, least, share):
    """The token at which the running sum of weights passes `share` of their total."""
    lane = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        weight = _survivors(at, start + lane, vocab, limit, least)
        tl.store(sums_at + start // BLOCK, tl.sum(weight, axis=0))
    tl.debug_barrier()
    block = tl.arange(0, MOST_BLOCKS)
    sums = tl.load(sums_at + block, mask=block * BLOCK < vocab, other=0)
    total = tl.sum(sums, axis=0)
    target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    passed = tl.cumsum(sums, axis=0) <= target
    before = tl.sum(tl.where(passed, sums, 0), axis=0)
    start = tl.sum(passed.to(tl.int32), axis=0) * BLOCK
    weight = _survivors(at, start + lane, vocab, limit, least)
    return start + tl.sum((before + tl.cumsum(weight, axis=0) <= target).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["rows", "biases", "stops"])
def sample_kernel(
    logits_ptr, found_ptr, count_ptr, outputs_ptr, reals_ptr, integers_ptr, bias_ids_ptr, bias_values_ptr,
    stop_ids_ptr, counts_ptr, seen_ptr, token_ptr, finite_ptr, logprob_ptr, ids_ptr, shares_ptr, edited_ptr, room_ptr,
    sums_ptr, stride, rows, vocab, biases, stops, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (M). found [4, M] as `read_out.Candidates.columns`; columns of slots as `SlotSampling` holds them.

    edited [M, V] float32 is written by rows that edit or draw, room [M, ROOM] int32 by those that filter, sums
    [M, MOST_BLOCKS] int64 by those that draw.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count_ptr):
        tl.store(token_ptr + row, 0)
        tl.store(finite_ptr + row, 0)
        return
    raw = logits_ptr + row * stride
    slot = tl.load(found_ptr + rows + row)
    reals, integers = reals_ptr + slot * REALS, integers_ptr + slot * INTEGERS
    peak, token, whole = _likeliest(raw, vocab)
    if whole == 0:
        tl.store(token_ptr + row, 0)
        tl.store(finite_ptr + row, 0)
        return

    penalises = (
        (tl.load(reals + REPETITION) != 1.0) | (tl.load(reals + PRESENCE) != 0.0) | (tl.load(reals + FREQUENCY) != 0.0)
    )
    place, stop = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_S)
    biased = tl.load(bias_ids_ptr + slot * biases + place, mask=place < biases, other=vocab)
    holds = tl.load(outputs_ptr + slot) < tl.load(integers + MIN_TOKENS)
    held = tl.load(stop_ids_ptr + slot * stops + stop, mask=stop < stops, other=vocab)
    held = tl.where(holds, held, vocab)
    at, top, finite = raw, peak, whole
    counts_at = counts_ptr + slot * vocab
    if penalises | (tl.min(biased, axis=0) < vocab) | (tl.min(held, axis=0) < vocab):
        at = edited_ptr + row * vocab
        values_at, seen_at = bias_values_ptr + slot * biases, seen_ptr + slot * vocab
        _edit(raw, at, vocab, reals, counts_at, seen_at, penalises, biased, values_at, biases, held, BLOCK_B)
        top, token, finite = _likeliest(at, vocab)

    temperature = tl.load(reals + TEMPERATURE)
    if (temperature > 0) & finite:
        top_k, top_p = tl.load(integers + TOP_K), tl.load(reals + TOP_P)
        distances = edited_ptr + row * vocab
        limit = tl.full([], NO_LIMIT, tl.int32)
        if (top_k > 0) | (top_p < 1.0):
            limit = find_limits(at, distances, room_ptr + row * ROOM, vocab, top, temperature, top_k, top_p)
        else:
            for start in range(0, vocab, BLOCK):
                measure(at, distances, start + tl.arange(0, BLOCK), vocab, top, temperature)
            tl.debug_barrier()
        min_p = tl.load(reals + MIN_P).to(tl.float64)
        least = tl.ceil(min_p * DRAW_UNIT).to(tl.int64)
        position = tl.load(found_ptr + 2 * rows + row) + 1
        share = _uniform(tl.load(integers + SEED), position, tl.load(integers + CHOICE))
        token = _draw(distances, sums_ptr + row * MOST_BLOCKS, vocab, limit, least, share)
    token = tl.minimum(token, vocab - 1)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.int8))
    log_total = _log_total(raw, vocab, peak)
    chosen = tl.load(raw + token)
    tl.store(logprob_ptr + row, ((chosen - peak).to(tl.float64) - log_total).to(tl.float32))
    wanted = tl.load(integers + ALTERNATIVES).to(tl.int32)
    if wanted > 0:
        _report(raw, ids_ptr + row * WIDTH, shares_ptr + row * WIDTH, vocab, wanted, peak, log_total)
    if penalises & finite:
        said = tl.load(counts_at + token)
        tl.store(counts_at + token, said + 1)


def sample(
    logits: Tensor, found: Tensor, count: Tensor, outputs: Tensor, columns: SlotSampling
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(tokens [M] int64, is_finite [M] int8, logprob [M] float32, top ids [M, K] int64, top logprobs [M, K]).

    logits [M, V] float32 of candidates `found` [4, M], of which the first `count` [1] int32 are due a token: the others
    get token 0 and mean nothing. `outputs` [slots] int64 are tokens so far. K is MAX_ALTERNATIVES; a row writes its
    columns only where it asks for some. Counts new tokens in the columns of slots that penalise.
    """
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB and logits.stride(1) == 1 and found.is_contiguous()
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.int8, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    ids = torch.empty(rows, MAX_ALTERNATIVES, dtype=torch.int64, device=device)
    shares = torch.empty(rows, MAX_ALTERNATIVES, dtype=torch.float32, device=device)
    biases, stops = columns.bias_ids.shape[1], columns.stop_ids.shape[1]
    sample_kernel[(rows,)](
        logits, found, count, outputs, columns.reals, columns.integers, columns.bias_ids, columns.bias_values,
        columns.stop_ids, columns.output_counts, columns.prompt_seen.view(torch.int8), tokens, finite, logprob, ids,
        shares,
        torch.empty(rows, vocab, dtype=torch.float32, device=device),
        torch.empty(rows, ROOM.value, dtype=torch.int32, device=device),
        torch.empty(rows, MOST_BLOCKS.value, dtype=torch.int64, device=device),
        logits.stride(0), rows, vocab, biases, stops,
        BLOCK_B=next_power(biases), BLOCK_S=next_power(stops),
        enable_fp_fusion=False,  # products and sums are rounded one by one, as torch rounds them
        num_warps=WARPS,
    )  # fmt: skip
    return tokens, finite, logprob, ids, shares
