# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of decode rows over the paged pool, KV cut in fixed pieces by the row's own length.

Owns the order of a decode row's sums: tiles of TILE positions inside a piece in order (online softmax), then the
pieces in order. Neither depends on other rows, so a row's bits follow from its own history. A persistent grid walks a
work list (row, piece) made once per traversal; whoever finishes a row's last piece adds the pieces up. Positions from
the row's length on are never read, so what a page's last owner left there is harmless. With `turning` the kernel also
rotates q and k and writes the row's own k and v, so that a layer of pure decode needs no launch for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, load_rotated
from epicycle.engine.kernels.triton_common import (
    TL_DTYPES,
    Ahead,
    ahead_bytes,
    cell_of,
    multiprocessors,
    next_power,
    prefetch_share,
)
from epicycle.engine.kernels.work_triton import WorkList

PIECE = 256  # positions a program takes at once
TILE = 64  # positions of one step of the online softmax
COMBINED_AT_ONCE = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """What pieces leave for the one that adds them up. Reused by every layer, in stream order.

    `sums` [entries, heads, d] and `stats` [entries, heads, 2] float32; `tickets` [rows, kv_heads] int32, zero between
    launches.
    """

    sums: Tensor
    stats: Tensor
    tickets: Tensor


def allocate_scratch(
    entries: int, rows: int, heads: int, kv_heads: int, width: int, device: torch.device
) -> DecodeScratch:
    """For work lists of up to `entries` entries over `rows` rows."""
    return DecodeScratch(
        torch.empty(entries, heads, width, dtype=torch.float32, device=device),
        torch.empty(entries, heads, 2, dtype=torch.float32, device=device),
        torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def _combine(
    sums_ptr, stats_ptr, out_at, first, pieces, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add up entries first .. first + pieces of one head, in blocks of COMBINED_AT_ONCE from the row's first piece."""
    lane = tl.arange(0, BLOCK_D)
    part = tl.arange(0, COMBINED_AT_ONCE)
    top = tl.full((COMBINED_AT_ONCE,), float("-inf"), tl.float32)
    for start in range(0, pieces, COMBINED_AT_ONCE):
        entry = (first + start + part).to(tl.int64) * HEADS + head
        top = tl.maximum(top, tl.load(stats_ptr + 2 * entry, mask=start + part < pieces, other=float("-inf")))
    highest = tl.max(top, axis=0)
    total = 0.0
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, pieces, COMBINED_AT_ONCE):
        mask = start + part < pieces
        entry = (first + start + part).to(tl.int64) * HEADS + head
        scale = tl.exp2(tl.load(stats_ptr + 2 * entry, mask=mask, other=float("-inf")) - highest)
        total += tl.sum(scale * tl.load(stats_ptr + 2 * entry + 1, mask=mask, other=0.0), axis=0)
        at = sums_ptr + entry[:, None] * HEAD_DIM + lane[None, :]
        held = tl.load(at, mask=mask[:, None] & (lane < HEAD_DIM)[None, :], other=0.0)
        mixed += tl.sum(scale[:, None] * held, axis=0)
    tl.store(out_at + lane, (mixed / total).to(DTYPE), mask=lane < HEAD_DIM)


@triton.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride", "piece_tokens", "ahead_bytes"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def decode_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, sums_ptr, stats_ptr, tickets_ptr, items_ptr, total_ptr,
    bias_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, ahead_ptr,
    q_stride, out_stride, table_stride, turn_stride, slots_per_page, layer, piece_tokens, scale, ahead_bytes,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    FUSED: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_AHEAD: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Jobs (entry, KV head) go round the programs. q is rotated, or the QKV product when FUSED. scale has log2(e)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    CELL: tl.constexpr = KV_HEADS * HEAD_DIM
    lane = tl.arange(0, BLOCK_D)
    member = tl.arange(0, BLOCK_G)
    if HAS_AHEAD:
        # The first loads of a job wait for one another (entry, slot, page, keys); memory has nothing to do meanwhile.
        prefetch_share(ahead_ptr, tl.program_id(0), ahead_bytes)
    jobs = tl.load(total_ptr) * KV_HEADS
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        entry = job // KV_HEADS
        kv_head = job % KV_HEADS
        row = tl.load(items_ptr + 2 * entry)
        piece = tl.load(items_ptr + 2 * entry + 1)
        slot = tl.load(slots_ptr + row)
        position = tl.load(positions_ptr + row)
        plane_slot = tl.load(plane_slots_ptr + row)
        length = position + 1
        pieces = (length + piece_tokens - 1) // piece_tokens
        head = kv_head * GROUP + member
        q_mask = (member < GROUP)[:, None] & (lane < HEAD_DIM)[None, :]
        q_at = q_ptr + row.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM
        if FUSED:
            cos_at = cos_ptr + position.to(tl.int64) * turn_stride
            sin_at = sin_ptr + position.to(tl.int64) * turn_stride
            q = load_rotated(
                q_at, bias_ptr + head[:, None] * HEAD_DIM, cos_at, sin_at, lane[None, :], q_mask,
                HEAD_DIM, PAIRS, HAS_BIAS, DTYPE,
            )  # fmt: skip
            if piece == pieces - 1:
                k_at = q_ptr + row.to(tl.int64) * q_stride + (HEADS + kv_head) * HEAD_DIM
                k_new = load_rotated(
                    k_at, bias_ptr + (HEADS + kv_head) * HEAD_DIM, cos_at, sin_at, lane, lane < HEAD_DIM,
                    HEAD_DIM, PAIRS, HAS_BIAS, DTYPE,
                )  # fmt: skip
                v_new = tl.load(k_at + KV_HEADS * HEAD_DIM + lane, mask=lane < HEAD_DIM, other=0.0)
                own = cell_of(
                    page_table_ptr, table_stride, slot, position, plane_slot, layer, slots_per_page, slot >= 0,
                    PAGE_TOKENS,
                )  # fmt: skip
                to = own * CELL + kv_head * HEAD_DIM + lane
                tl.store(k_pool_ptr + to, k_new, mask=lane < HEAD_DIM)
                tl.store(v_pool_ptr + to, v_new, mask=lane < HEAD_DIM)
                tl.debug_barrier()  # this program reads the cell back below; nobody else reads it in this launch
        else:
            q = tl.load(q_at + lane[None, :], mask=q_mask, other=0.0)
        begin = piece * piece_tokens
        end = tl.minimum(begin + piece_tokens, length)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        mixed = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for start in range(begin, end, BLOCK_T):
            key = start + tl.arange(0, BLOCK_T)
            held = key < end
            cell = cell_of(
                page_table_ptr, table_stride, slot, key, plane_slot, layer, slots_per_page, held, PAGE_TOKENS
            )
            at = cell[:, None] * CELL + kv_head * HEAD_DIM + lane[None, :]
            mask = held[:, None] & (lane < HEAD_DIM)[None, :]
            k = tl.load(k_pool_ptr + at, mask=mask, other=0.0)
            v = tl.load(v_pool_ptr + at, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where(held[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
            weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -new_top[:, None] + tl.zeros_like(scores)))
            fade = tl.exp2(top - new_top)
            total = tl.fma(total, fade, tl.sum(weights, axis=1))
            mixed = tl.dot(weights.to(DTYPE), v, mixed * fade[:, None], input_precision="ieee")
            top = new_top
        group_mask = member < GROUP
        out_at = out_ptr + row.to(tl.int64) * out_stride
        if pieces == 1:
            share = (mixed / total[:, None]).to(DTYPE)
            tl.store(out_at + head[:, None] * HEAD_DIM + lane[None, :], share, mask=q_mask)
        else:
            place = entry.to(tl.int64) * HEADS + head
            tl.store(sums_ptr + place[:, None] * HEAD_DIM + lane[None, :], mixed, mask=q_mask)
            tl.store(stats_ptr + 2 * place, top, mask=group_mask)
            tl.store(stats_ptr + 2 * place + 1, total, mask=group_mask)
            tl.debug_barrier()  # all of this program's stores come before its ticket
            ticket_at = tickets_ptr + row * KV_HEADS + kv_head
            if tl.atomic_add(ticket_at, 1, sem="acq_rel") == pieces - 1:
                tl.store(ticket_at, 0)
                for one in range(GROUP):
                    mine = kv_head * GROUP + one
                    _combine(
                        sums_ptr, stats_ptr, out_at + mine * HEAD_DIM, entry - piece, pieces, mine,
                        HEADS, HEAD_DIM, BLOCK_D, DTYPE,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How to run it; bits don't depend on any of these."""

    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 4


def decode_attention(
    q: Tensor,
    heads: int,
    rows: RowAddresses,
    work: WorkList,
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
    ahead: Ahead | None = None,
) -> Tensor:
    """[N, heads * d] attention of the rows that `work` (made with `piece`) lists; other rows of `out` are unwritten.

    q [N, heads * d] rotated, its k and v in the pool; or, with `turning`, the QKV product [N, (heads + 2 kv_heads) d],
    then k and v are written here. Scale d ** -0.5. `ahead` is fetched meanwhile, as far as there
    are programs for it.
    """
    _, page_tokens, kv_heads, width = k_pool.shape
    config = config or DecodeConfig()
    out = torch.empty(q.shape[0], heads * width, dtype=q.dtype, device=q.device) if out is None else out
    programs = min(work.most * kv_heads, multiprocessors(q.device) * config.programs_per_sm)
    turn = turning or Turning(q, q, False)
    decode_kernel[(programs,)](
        q,
        k_pool,
        v_pool,
        out,
        scratch.sums,
        scratch.stats,
        scratch.tickets,
        work.items,
        work.total,
        q if turn.bias is None else turn.bias,
        turn.cos,
        turn.sin,
        rows.slots,
        rows.positions,
        rows.plane_slots,
        rows.page_table,
        q if ahead is None else ahead.weight,
        q.stride(0),
        out.stride(0),
        rows.page_table.stride(0),
        turn.cos.stride(0),
        rows.slots_per_page,
        layer,
        piece,
        width**-0.5 * 1.4426950408889634,
        ahead_bytes(ahead),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=width,
        BLOCK_D=next_power(width),
        BLOCK_G=max(16, next_power(heads // kv_heads)),
        BLOCK_T=tile,
        PAGE_TOKENS=page_tokens,
        FUSED=turning is not None,
        PAIRS=turn.pairs,
        HAS_BIAS=turn.bias is not None,
        HAS_AHEAD=ahead_bytes(ahead) > 0,
        DTYPE=TL_DTYPES[q.dtype],
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
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
