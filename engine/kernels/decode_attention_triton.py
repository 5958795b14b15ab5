# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of decode rows over the paged pool, KV cut in fixed pieces by the row's own length.

Owns the order of a decode row's sums: tiles of TILE positions inside a piece in order (online softmax), then
the pieces in order (`pieces_triton`). Neither depends on other rows, so a row's bits follow from its own history. A
persistent grid walks a list of runs (`runs_triton`) made once per traversal; a run is one piece or several in a row,
read in one stream, and its length changes no bit: short runs spread one row over the card, long ones save the cost of
starting and ending. Whoever finishes a row's last run adds its pieces up. Positions from the row's length on are never
read, so what a page's last owner left there is harmless. With `turning` the kernel also rotates q and k and writes the
row's own k and v, so that a layer of pure decode needs no launch for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.early_decode_triton import early_decode_kernel
from epicycle.engine.kernels.pieces_triton import combine_pieces
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, load_pair, load_rotated, load_turn
from epicycle.engine.kernels.runs_triton import COLUMNS, Runs, fill_runs
from epicycle.engine.kernels.triton_common import (
    TL_DTYPES,
    cell_in,
    launch_options,
    multiprocessors,
    next_power,
    pages_of,
    rotated,
)

PIECE = 128  # positions that are summed apart: part of the numerics
TILE = 64  # positions of one step of the online softmax: part of the numerics
WARPS = 4  # part of the numerics: a tile's weights are added in the order that the warps' layout gives
EARLY_PROGRAMS_PER_SM = 2  # what the next product holds in shared memory must fit beside them
EARLY_REGISTERS = 224
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """What pieces leave for the one that adds them up. Reused by every layer, in stream order.

    Every piece of every row has a place (`Runs`). `sums` [places, heads, d] and `stats` [places, heads, 2] float32;
    `tickets` [rows, kv_heads] int32, zero between launches.
    """

    sums: Tensor
    stats: Tensor
    tickets: Tensor


def allocate_scratch(
    pieces: int, rows: int, heads: int, kv_heads: int, width: int, device: torch.device
) -> DecodeScratch:
    """For lists of rows with up to `pieces` pieces together."""
    return DecodeScratch(
        torch.empty(pieces, heads, width, dtype=torch.float32, device=device),
        torch.empty(pieces, heads, 2, dtype=torch.float32, device=device),
        torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
    )


def list_runs(
    work: Runs,
    sizes: Tensor,
    kv_heads: int,
    width: int,
    *,
    ahead: bool = False,
    share: Tensor | None = None,
    length: int = 0,
) -> None:
    """Fill `work` with rows of `sizes` [N] int32 positions (the row's own included; 0 for none), in runs that keep the
    programs of their launch busy alike, or of `length` pieces. `work` has room for every piece; `ahead` is the
    launch's, `share` (`share_triton`) what it is left to run beside.
    """
    per_sm = EARLY_PROGRAMS_PER_SM if ahead else default_config(len(sizes), width).programs_per_sm
    programs = per_sm if share is not None else per_sm * multiprocessors(sizes.device)
    fill_runs(work, sizes, PIECE, programs, kv_heads, share=share, length=length)


@triton.jit
def _own_lanes(
    q_at, bias_ptr, cos_at, sin_at, k_pool_ptr, v_pool_ptr, cell, head, member, kv_head, lane, writes,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FUSED: tl.constexpr, PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Some lanes of the queries [BLOCK_G, lanes] of one KV head, rotated if FUSED; then their row's k and v go to
    `cell` if `writes`. A lone query turns as one line, and fills the block then: as a block it would be sixteen times
    the work and the code, and whoever runs code once in a launch waits for it. What it needs is asked for together."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    inside = lane < HEAD_DIM
    k_at, k_bias_at = q_at + (HEADS + kv_head) * HEAD_DIM, bias_ptr + (HEADS + kv_head) * HEAD_DIM
    v_at = k_at + KV_HEADS * HEAD_DIM
    if FUSED and GROUP == 1:
        first = kv_head * HEAD_DIM
        own = lane < tl.where(writes, HEAD_DIM, 0)
        q, q_partner = load_pair(q_at + first, bias_ptr + first, lane, inside, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
        k, k_partner = load_pair(k_at, k_bias_at, lane, own, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
        v = tl.load(v_at + lane, mask=own, other=0.0)
        cos, sin = load_turn(cos_at, sin_at, lane, HEAD_DIM, PAIRS)
        if writes:
            to = cell * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + lane
            tl.store(k_pool_ptr + to, rotated(k, k_partner, cos, sin, lane, HEAD_DIM, PAIRS, DTYPE), mask=inside)
            tl.store(v_pool_ptr + to, v, mask=inside)
        q = rotated(q, q_partner, cos, sin, lane, HEAD_DIM, PAIRS, DTYPE)
        return tl.broadcast_to(q[None, :], (member.shape[0], lane.shape[0]))
    else:
        mask = (member < GROUP)[:, None] & inside[None, :]
        at = head[:, None] * HEAD_DIM
        if FUSED:
            if writes:
                k = load_rotated(k_at, k_bias_at, cos_at, sin_at, lane, inside, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
                to = cell * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + lane
                tl.store(k_pool_ptr + to, k, mask=inside)
                tl.store(v_pool_ptr + to, tl.load(v_at + lane, mask=inside, other=0.0), mask=inside)
            return load_rotated(
                q_at + at, bias_ptr + at, cos_at, sin_at, lane[None, :], mask, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE
            )
        else:
            return tl.load(q_at + at + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _held_lanes(pool_ptr, cell, held, kv_head, lane, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Some lanes of keys or values [tokens, lanes] of one KV head, zeros where nothing is `held`."""
    at = cell[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + lane[None, :]
    return tl.load(pool_ptr + at, mask=held[:, None] & (lane < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend_run(
    q_at, bias_ptr, cos_ptr, sin_ptr, k_pool_ptr, v_pool_ptr, out_at, sums_ptr, stats_ptr, ticket_at, table_at,
    position, place, slots_per_page, turn_stride, begin, run_tokens, item, kv_head, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LANES_0: tl.constexpr, LANES_1: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, PIECE_T: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    FUSED: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One run of one row for the queries of one KV head; whoever ends a row's last run adds its pieces up.

    q_at, out_at and table_at point to the row's own q (the QKV product when FUSED), result and pages; place is
    plane_slot + layer; ticket_at belongs to the row and KV head, item to the run. A head is LANES_0 lanes and, where
    that isn't all of it, LANES_1 more.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDE_1: tl.constexpr = LANES_1 if LANES_1 else 16
    lane0 = tl.arange(0, LANES_0)
    lane1 = LANES_0 + tl.arange(0, WIDE_1)
    member = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    length = position + 1
    end = tl.minimum(begin + run_tokens, length)
    page = pages_of(table_at, begin, end, BLOCK_T, PAGE_TOKENS)
    own = cell_in(tl.load(table_at + position // PAGE_TOKENS), place, slots_per_page, position, PAGE_TOKENS)
    if EARLY:
        gdc_wait()
    cos_at = cos_ptr + position.to(tl.int64) * turn_stride
    sin_at = sin_ptr + position.to(tl.int64) * turn_stride
    writes = end == length
    q0 = _own_lanes(
        q_at, bias_ptr, cos_at, sin_at, k_pool_ptr, v_pool_ptr, own, head, member, kv_head, lane0, writes,
        HEADS, KV_HEADS, HEAD_DIM, FUSED, PAIRS, HAS_BIAS, DTYPE,
    )  # fmt: skip
    if LANES_1:
        q1 = _own_lanes(
            q_at, bias_ptr, cos_at, sin_at, k_pool_ptr, v_pool_ptr, own, head, member, kv_head, lane1, writes,
            HEADS, KV_HEADS, HEAD_DIM, FUSED, PAIRS, HAS_BIAS, DTYPE,
        )  # fmt: skip
    if FUSED and writes:
        tl.debug_barrier()  # this program reads the cell back below; nobody else reads it in this launch
    mask0 = (member < GROUP)[:, None] & (lane0 < HEAD_DIM)[None, :]
    mask1 = (member < GROUP)[:, None] & (lane1 < HEAD_DIM)[None, :]
    out_to = out_at + head[:, None] * HEAD_DIM
    first_place, runs = tl.load(item + 3), tl.load(item + 4)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    mixed0 = tl.zeros((BLOCK_G, LANES_0), tl.float32)
    mixed1 = tl.zeros((BLOCK_G, WIDE_1), tl.float32)
    for start in range(begin, end, BLOCK_T):
        coming = pages_of(table_at, start + BLOCK_T, end, BLOCK_T, PAGE_TOKENS)
        key = start + tl.arange(0, BLOCK_T)
        held = key < end
        cell = cell_in(page, place, slots_per_page, key, PAGE_TOKENS)
        k0 = _held_lanes(k_pool_ptr, cell, held, kv_head, lane0, KV_HEADS, HEAD_DIM)
        v0 = _held_lanes(v_pool_ptr, cell, held, kv_head, lane0, KV_HEADS, HEAD_DIM)
        # A new piece starts from nothing: what the last one left fades to zero.
        top = tl.where(start % PIECE_T == 0, float("-inf"), top)
        scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if LANES_1:
            k1 = _held_lanes(k_pool_ptr, cell, held, kv_head, lane1, KV_HEADS, HEAD_DIM)
            v1 = _held_lanes(v_pool_ptr, cell, held, kv_head, lane1, KV_HEADS, HEAD_DIM)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        scores = tl.where(held[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -new_top[:, None] + tl.zeros_like(scores)))
        fade = tl.exp2(top - new_top)
        total = tl.fma(total, fade, tl.sum(weights, axis=1))
        mixed0 = tl.dot(weights.to(DTYPE), v0, mixed0 * fade[:, None], input_precision="ieee")
        if LANES_1:
            mixed1 = tl.dot(weights.to(DTYPE), v1, mixed1 * fade[:, None], input_precision="ieee")
        top = new_top
        page = coming
        if (start + BLOCK_T) % PIECE_T == 0 or start + BLOCK_T >= end:
            if length <= PIECE_T:
                tl.store(out_to + lane0[None, :], (mixed0 / total[:, None]).to(DTYPE), mask=mask0)
                if LANES_1:
                    tl.store(out_to + lane1[None, :], (mixed1 / total[:, None]).to(DTYPE), mask=mask1)
            else:
                to = (first_place + (start - begin) // PIECE_T).to(tl.int64) * HEADS + head
                tl.store(sums_ptr + to[:, None] * HEAD_DIM + lane0[None, :], mixed0, mask=mask0)
                if LANES_1:
                    tl.store(sums_ptr + to[:, None] * HEAD_DIM + lane1[None, :], mixed1, mask=mask1)
                tl.store(stats_ptr + 2 * to, top, mask=member < GROUP)
                tl.store(stats_ptr + 2 * to + 1, total, mask=member < GROUP)
    if length > PIECE_T:
        tl.debug_barrier()  # all of this program's stores come before its ticket
        is_last = True
        if runs > 1:
            is_last = tl.atomic_add(ticket_at, 1, sem="acq_rel") == runs - 1
        if is_last:
            if runs > 1:
                tl.store(ticket_at, 0)
            pieces = (length + PIECE_T - 1) // PIECE_T
            first = first_place - begin // PIECE_T
            for one in range(GROUP):
                mine = kv_head * GROUP + one
                combine_pieces(
                    sums_ptr, stats_ptr, out_at + mine * HEAD_DIM, first, pieces, mine,
                    HEADS, HEAD_DIM, 2 * LANES_0 if LANES_1 else LANES_0, DTYPE,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def decode_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, sums_ptr, stats_ptr, tickets_ptr, items_ptr, total_ptr, programs_ptr,
    bias_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr,
    q_stride, out_stride, table_stride, turn_stride, slots_per_page, layer, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LANES_0: tl.constexpr, LANES_1: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, PIECE_T: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    FUSED: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, BESIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Jobs (entry, KV head) go round the programs. q is rotated, or the QKV product when FUSED. scale has log2(e). With
    BESIDE the launch before this one runs on meanwhile."""
    if EARLY:
        gdc_launch_dependents()
    item = items_ptr + tl.program_id(0) // KV_HEADS * COLUMNS
    row, begin, pieces = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    programs = tl.minimum(tl.load(programs_ptr), tl.num_programs(0))
    jobs = tl.where(tl.program_id(0) < programs, tl.load(total_ptr) * KV_HEADS, 0)
    row = tl.where(tl.program_id(0) < jobs, row, 0)  # what a list holds beyond its end may name rows of another time
    slot, position, plane_slot = tl.load(slots_ptr + row), tl.load(positions_ptr + row), tl.load(plane_slots_ptr + row)
    for job in range(tl.program_id(0), jobs, programs):
        # What the next job needs to know is on its way while this one runs.
        item = items_ptr + job // KV_HEADS * COLUMNS
        following = job + programs
        next_item = items_ptr + following // KV_HEADS * COLUMNS
        next_row = tl.load(next_item, mask=following < jobs, other=0)
        next_begin = tl.load(next_item + 1, mask=following < jobs, other=0)
        next_pieces = tl.load(next_item + 2, mask=following < jobs, other=0)
        if pieces > 0:
            attend_run(
                q_ptr + row.to(tl.int64) * q_stride, bias_ptr, cos_ptr, sin_ptr, k_pool_ptr, v_pool_ptr,
                out_ptr + row.to(tl.int64) * out_stride, sums_ptr, stats_ptr,
                tickets_ptr + row * KV_HEADS + job % KV_HEADS, page_table_ptr + slot.to(tl.int64) * table_stride,
                position, plane_slot + layer, slots_per_page, turn_stride, PIECE_T * begin, PIECE_T * pieces,
                item, job % KV_HEADS, scale,
                HEADS, KV_HEADS, HEAD_DIM, LANES_0, LANES_1, BLOCK_G, BLOCK_T, PIECE_T, PAGE_TOKENS,
                FUSED, PAIRS, HAS_BIAS, EARLY, DTYPE,
            )  # fmt: skip
        row, begin, pieces = next_row, next_begin, next_pieces
        slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
        plane_slot = tl.load(plane_slots_ptr + row)
    # Also where there is no job: whoever waits for this launch waits for those before it. One program is enough where
    # others, that had no room yet, are to come and go meanwhile.
    if EARLY or (BESIDE and tl.program_id(0) == 0):
        gdc_wait()


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How to run it; bits don't depend on any of these."""

    stages: int = 2
    programs_per_sm: int = 4
    registers: int | None = 128  # of a thread, at most: more programs side by side hide more waiting


MANY = DecodeConfig()
FEW = DecodeConfig(programs_per_sm=3, registers=168)
FEW_ROWS = 8


def lanes_of(width: int) -> tuple[int, int]:
    """A head in blocks of a power of two: one, or two where those are less than the next power. Products add up lanes
    in their order, so that bits are those of one block."""
    first = next_power(width + 1) // 2
    rest = max(16, next_power(width - first)) if width > first else 0
    return (first, rest) if rest < first else (2 * first, 0)


def default_config(rows: int, width: int) -> DecodeConfig:
    """What ran best: few rows have no use for a fourth program on a multiprocessor, and stream longer by fewer. Heads
    that don't fill a block of lanes leave shared memory for a third tile, and have the more use for it the more rows
    there are."""
    if width == next_power(width):
        return FEW if rows <= FEW_ROWS else MANY
    return MANY if rows <= FEW_ROWS else DecodeConfig(3, 3, 168)


def decode_attention(
    q: Tensor,
    heads: int,
    rows: RowAddresses,
    work: Runs,
    scratch: DecodeScratch,
    k_pool: Tensor,
    v_pool: Tensor,
    layer: int,
    *,
    turning: Turning | None = None,
    out: Tensor | None = None,
    piece: int = PIECE,
    tile: int = TILE,
    config: DecodeConfig | None = None,
    early: bool = False,
    ahead: bool = False,
    beside: bool = False,
) -> Tensor:
    """[N, heads * d] attention of the rows that `work` lists in runs; other rows of `out` are unwritten.

    q [N, heads * d] rotated, its k and v in the pool; or, with `turning`, the QKV product [N, (heads + 2 kv_heads) d],
    then k and v are written here. Scale d ** -0.5. `work` is cut in pieces of `piece`; bits depend on that and on
    `tile`, not on runs. `early`: the launch may start before the one before it has ended, which made neither `work` nor
    `rows` (see `triton_common.starts_early`); with `ahead`, and with `turning`, it also reads the keys of earlier
    positions by then, which is for one row and for shapes that `early_check` knows. `beside`:
    it runs beside the prompt attention that was launched right before it, and `work` is cut for what that leaves.
    """
    _, page_tokens, kv_heads, width = k_pool.shape
    assert piece % tile == 0, (piece, tile)
    config = config or default_config(len(q), width)
    out = torch.empty(q.shape[0], heads * width, dtype=q.dtype, device=q.device) if out is None else out
    turn = turning or Turning(q, q, False)
    arguments = (
        q,
        k_pool,
        v_pool,
        out,
        scratch.sums,
        scratch.stats,
        scratch.tickets,
        work.items,
        work.total,
        work.programs,
        q if turn.bias is None else turn.bias,
        turn.cos,
        turn.sin,
        rows.slots,
        rows.positions,
        rows.plane_slots,
        rows.page_table,
        q.stride(0),
        out.stride(0),
        rows.page_table.stride(0),
        turn.cos.stride(0),
        rows.slots_per_page,
        layer,
        width**-0.5 * LOG2_E,
    )
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": width,
        "BLOCK_G": max(16, next_power(heads // kv_heads)),
        "BLOCK_T": tile,
        "PIECE_T": piece,
        "PAGE_TOKENS": page_tokens,
        "PAIRS": turn.pairs,
        "HAS_BIAS": turn.bias is not None,
        "DTYPE": TL_DTYPES[q.dtype],
        "enable_fp_fusion": True,
        "num_warps": WARPS,
    }
    jobs, side_by_side = work.most * kv_heads, multiprocessors(q.device)
    assert not (early and beside), "a launch that runs beside another waits for nobody"
    if ahead:
        assert early and turning is not None and (piece, tile) == (PIECE, TILE), (early, piece, tile)
        early_decode_kernel[(min(jobs, side_by_side * EARLY_PROGRAMS_PER_SM),)](
            *arguments, **constants, BLOCK_D=next_power(width), WARPS=WARPS, maxnreg=EARLY_REGISTERS, launch_pdl=True
        )
    else:
        lanes_0, lanes_1 = lanes_of(width)
        decode_kernel[(min(jobs, side_by_side * config.programs_per_sm),)](
            *arguments,
            **constants,
            LANES_0=lanes_0,
            LANES_1=lanes_1,
            FUSED=turning is not None,
            EARLY=early,
            BESIDE=beside,
            num_stages=config.stages,
            maxnreg=config.registers,
            **launch_options(early or beside),
        )
    return out


def plain_decode_attention(
    q: Tensor, heads: int, rows: RowAddresses, k_pool: Tensor, v_pool: Tensor, layer: int
) -> Tensor:
    """The torch twin over a rotated q with k and v in the pool, in q's dtype; padding rows are zero."""
    _, _, kv_heads, width = k_pool.shape
    out = torch.zeros(q.shape[0], heads * width, dtype=q.dtype, device=q.device)
    for row in (rows.slots >= 0).nonzero().squeeze(1).tolist():
        keys, values = history(rows, row, int(rows.positions[row]) + 1, k_pool, v_pool, layer)
        query = q[row].view(kv_heads, heads // kv_heads, width)
        scores = torch.einsum("kgd,tkd->kgt", query * width**-0.5, keys)
        out[row] = torch.einsum("kgt,tkd->kgd", torch.softmax(scores, dim=-1), values).flatten()
    return out


def history(
    rows: RowAddresses, row: int, length: int, k_pool: Tensor, v_pool: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [length, kv_heads, d] of one row's request in the row's plane; for the twins."""
    _, page_tokens, kv_heads, width = k_pool.shape
    every = RowAddresses(
        rows.slots[row].expand(length),
        torch.arange(length, dtype=torch.int32, device=k_pool.device),
        rows.plane_slots[row].expand(length),
        rows.page_table,
        rows.slots_per_page,
    )
    cells = every.cells(layer, page_tokens)
    return k_pool.view(-1, kv_heads, width)[cells], v_pool.view(-1, kv_heads, width)[cells]
