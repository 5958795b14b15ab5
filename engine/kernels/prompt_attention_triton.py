# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of prompt rows over the paged pool: query tiles of many requests' chunks in one launch.

Owns the order of a prompt row's sums: KV tiles of TILE positions on a fixed grid from position 0, one online softmax.
A tile that is wholly masked for a row changes nothing of it (weights are exactly 0, factors exactly 1), so a row's bits
don't depend on how its prompt was cut in chunks or tiles, nor on the requests beside it. KV of the chunk itself is in
the pool before the launch. It must not know requests: a chunk is a run of rows with one slot and plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.decode_attention_triton import history
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_common import TL_DTYPES, next_power, pages_of
from epicycle.engine.kernels.work_triton import WorkList

QUERY_TILE = 64  # rows of one work item, where that suits few rows as well
TILE = 128  # positions of one step of the online softmax
LEEWAY = tl.constexpr(8.0)  # by so much, in powers of two, may a weight exceed 1 before the others are scaled anew


@triton.jit
def _pages(table_at, start, end, BLOCK_T: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """`pages_of` a tile that begins at a multiple of BLOCK_T, by fewer instructions where pages divide tiles."""
    if BLOCK_T % PAGE_TOKENS:
        return pages_of(table_at, start, end, BLOCK_T, PAGE_TOKENS)
    place = tl.arange(0, BLOCK_T)
    return tl.load(table_at + start // PAGE_TOKENS + place // PAGE_TOKENS, mask=place < end - start, other=0)


@triton.jit
def _lane_sums(weights):
    """[Q, 4] sums of a tile's weights [Q, a power of two]: columns (2 i, 2 i + 1) of the same i modulo 4, neighbours
    first, then halves. Matrix units leave those to one thread, so nothing goes from one to another until the end."""
    even, odd = tl.split(tl.reshape(weights, (weights.shape[0], weights.shape[1] // 2, 2)))
    sums = even + odd
    for _ in tl.static_range(5):
        if sums.shape[1] > 4:
            low, high = tl.split(tl.permute(tl.reshape(sums, (sums.shape[0], 2, sums.shape[1] // 2)), (0, 2, 1)))
            sums = low + high
    return sums


@triton.jit
def _step(
    q, top, total, mixed, page, k_pool_ptr, v_pool_ptr, place, slots_per_page, kv_head, start, end, asked, scale,
    CELL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One KV tile, in the pages `page` [BLOCK_T]. Without MASKED every query sees every key of it. Both forms compute
    the same bits: fused multiply-adds are written out so that the compiler can't choose differently.

    Values are added to those of the tiles before in the matrix unit, to which a weight of 0 adds nothing at all. A
    row's top follows its scores only where they exceed it by LEEWAY: most tiles leave what was mixed as it is."""
    lane = tl.arange(0, BLOCK_D)
    key = start + tl.arange(0, BLOCK_T)
    held = key < end
    # Where pages divide tiles, a key's place in its page is known beforehand.
    inside = key % PAGE_TOKENS if BLOCK_T % PAGE_TOKENS else tl.arange(0, BLOCK_T) % PAGE_TOKENS
    page_size = slots_per_page * (PAGE_TOKENS * CELL)
    at = page.to(tl.int64)[:, None] * page_size + (place * (PAGE_TOKENS * CELL) + kv_head * HEAD_DIM)
    at += (inside * CELL)[:, None] + lane[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:
        mask = held[:, None] & (lane < HEAD_DIM)[None, :]
        k = tl.load(k_pool_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_pool_ptr + at, mask=mask, other=0.0)
    else:
        k = tl.load(k_pool_ptr + at)
        v = tl.load(v_pool_ptr + at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= asked[:, None], scores, float("-inf"))
    most = tl.max(scores, axis=1) * scale
    new_top = tl.where(most > top + LEEWAY, most, top)
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) - new_top[:, None]))
    fade = tl.exp2(top - new_top)
    sums = _lane_sums(weights)
    total = tl.fma(total, tl.zeros_like(sums) + fade[:, None], sums)
    mixed = tl.dot(weights.to(DTYPE), v, mixed * fade[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["firsts_ptr", "counts_ptr", "slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def prompt_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, items_ptr, total_ptr, firsts_ptr, counts_ptr,
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr,
    q_stride, out_stride, table_stride, slots_per_page, layer, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, PAGE_TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (HEADS, most work items). Later items of a chunk see more keys, so they go first."""
    item = tl.load(total_ptr) - 1 - tl.program_id(1)
    if item < 0:
        return
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    chunk = tl.load(items_ptr + 2 * item)
    past = tl.load(items_ptr + 2 * item + 1) * BLOCK_Q
    first = tl.load(firsts_ptr + chunk) + past
    live = tl.minimum(tl.load(counts_ptr + chunk) - past, BLOCK_Q)
    slot = tl.load(slots_ptr + first)
    position = tl.load(positions_ptr + first)
    plane_slot = tl.load(plane_slots_ptr + first)
    query = tl.arange(0, BLOCK_Q)
    lane = tl.arange(0, BLOCK_D)
    asked = position + query
    end = position + live
    at = (first + query).to(tl.int64)[:, None]
    mask = (query < live)[:, None] & (lane < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + at * q_stride + head * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q, 4), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    open_end = (position + 1) // BLOCK_T * BLOCK_T
    table_at = page_table_ptr + slot.to(tl.int64) * table_stride
    place = plane_slot + layer
    page = _pages(table_at, 0, end, BLOCK_T, PAGE_TOKENS)
    for start in range(0, open_end, BLOCK_T):
        coming = _pages(table_at, start + BLOCK_T, end, BLOCK_T, PAGE_TOKENS)
        top, total, mixed = _step(
            q, top, total, mixed, page, k_pool_ptr, v_pool_ptr, place, slots_per_page, kv_head, start, end, asked,
            scale, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_T, PAGE_TOKENS, DTYPE, False,
        )  # fmt: skip
        page = coming
    for start in range(open_end, end, BLOCK_T):
        coming = _pages(table_at, start + BLOCK_T, end, BLOCK_T, PAGE_TOKENS)
        top, total, mixed = _step(
            q, top, total, mixed, page, k_pool_ptr, v_pool_ptr, place, slots_per_page, kv_head, start, end, asked,
            scale, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_T, PAGE_TOKENS, DTYPE, True,
        )  # fmt: skip
        page = coming
    low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_Q, 2, 2)), (0, 2, 1)))
    total = tl.sum(low + high, axis=1)
    share = (mixed * (1.0 / total)[:, None]).to(DTYPE)
    tl.store(out_ptr + at * out_stride + head * HEAD_DIM + lane[None, :], share, mask=mask)


LONG_TOKENS = 8192  # a context in which wide query tiles pay; in shorter ones they are too few to go round


def query_tile(rows: int, context_tokens: int, head_dim: int) -> int:
    """Rows of one work item where a tick has so many prompt rows, of requests up to so long. Wide ones read less KV;
    bits are the same."""
    is_wide = rows >= 1024 and context_tokens >= LONG_TOKENS and next_power(head_dim) == head_dim
    return 2 * QUERY_TILE if is_wide else QUERY_TILE


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Runs of prompt rows: `firsts` [C] int32 first row of the traversal, `counts` [C] int32 rows (0: no chunk).

    `work` lists (chunk, query tile), made from `counts` with pieces of `query_tile`.
    """

    firsts: Tensor
    counts: Tensor
    work: WorkList
    query_tile: int = QUERY_TILE


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """How to run it; bits don't depend on any of these."""

    warps: int = 4
    stages: int = 2


def prompt_attention(
    q: Tensor,
    heads: int,
    rows: RowAddresses,
    chunks: PromptChunks,
    k_pool: Tensor,
    v_pool: Tensor,
    layer: int,
    *,
    out: Tensor | None = None,
    tile: int = TILE,
    config: PromptConfig | None = None,
) -> Tensor:
    """[N, heads * d] causal attention of the chunks' rows; other rows of `out` are unwritten. Scale d ** -0.5.

    q [N, heads * d] is rotated; rows of a chunk are consecutive in q and in position, with one slot and plane.
    """
    _, page_tokens, kv_heads, width = k_pool.shape
    assert rows.slots_per_page * page_tokens * kv_heads * width < 1 << 31, "a page's size is a 32-bit number"
    config = config or PromptConfig(warps=chunks.query_tile // 16)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    prompt_kernel[(heads, chunks.work.most)](
        q,
        k_pool,
        v_pool,
        out,
        chunks.work.items,
        chunks.work.total,
        chunks.firsts,
        chunks.counts,
        rows.slots,
        rows.positions,
        rows.plane_slots,
        rows.page_table,
        q.stride(0),
        out.stride(0),
        rows.page_table.stride(0),
        rows.slots_per_page,
        layer,
        width**-0.5 * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=width,
        BLOCK_D=next_power(width),
        BLOCK_Q=chunks.query_tile,
        BLOCK_T=tile,
        PAGE_TOKENS=page_tokens,
        DTYPE=TL_DTYPES[q.dtype],
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def plain_prompt_attention(
    q: Tensor, heads: int, rows: RowAddresses, chunks: PromptChunks, k_pool: Tensor, v_pool: Tensor, layer: int
) -> Tensor:
    """The torch twin, in q's dtype; rows outside the chunks are zero."""
    _, _, kv_heads, width = k_pool.shape
    out = torch.zeros_like(q)
    for first, count in zip(chunks.firsts.tolist(), chunks.counts.tolist(), strict=True):
        if count < 1:
            continue
        start = int(rows.positions[first])
        keys, values = history(rows, first, start + count, k_pool, v_pool, layer)
        query = q[first : first + count].view(count, kv_heads, heads // kv_heads, width)
        scores = torch.einsum("nkgd,tkd->kgnt", query * width**-0.5, keys)
        key = torch.arange(start + count, device=q.device)
        hidden = key[None, :] > (start + torch.arange(count, device=q.device))[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[first : first + count] = torch.einsum("kgnt,tkd->nkgd", weights, values).flatten(1)
    return out
