# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of prompt rows for Hopper: one warp brings keys and values, two groups of four warps take turns with them.

Owns one Gluon kernel with the sums of `prompt_attention_triton`, its twin, in the same order: the same KV tiles, the
same layout of a tile's scores, values added to those of the tiles before. One warp (`hopper_prompt_feed`) copies pages
into rings by the tensor memory accelerator, far ahead. Each group of four has 64 query rows of an item; it asks for the
scores of tile j and the values of tile j - 1 together, and does the softmax of tile j while the matrix units still work
on those values or for the other group. Programs take one job (an item and a head) after the other, the longest first,
so that what the next one reads comes while one ends. It must not know which traversal it serves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from epicycle.engine.kernels.gluon_common import thread_barrier
from epicycle.engine.kernels.hopper_prompt_feed import (
    BOX_TOKENS,
    K_SLOTS,
    TILE,
    V_SLOTS,
    phase_of,
    produce,
    read,
    slot_of,
)
from epicycle.engine.kernels.prompt_attention_triton import LEEWAY, PromptChunks
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_common import TL_DTYPES, multiplies_in_groups, multiprocessors

GROUP_ROWS = 64
ROWS = (GROUP_ROWS, 2 * GROUP_ROWS)  # of one work item: for one group of warps, for two
LANES = {64: (64, 0), 96: (64, 32), 128: (128, 0)}  # how a head lies in shared memory
SWIZZLE = {32: 64, 64: 128}  # bytes, by lanes of a box
REGISTERS = 168  # of a thread, while warps don't differ; then those that multiply take most
WIDE_REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def _fade_text(count):
    """Assembly that multiplies a thread's `count` numbers, of two rows, by as many others. Where those are 1 all over
    the warp, as in most tiles, it goes around that: bits are the same, and power is what limits this kernel."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000; "
        f"setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p; vote.sync.any.pred q, p, 0xffffffff; "
        f"@!q bra.uni same; {products} same: }}"
    )


@gluon.constexpr_function
def _fade_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def _score(q0, q1, k0, k1, slot, zero, LANES_1: gl.constexpr):
    scores = warpgroup_mma(q0, k0.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if LANES_1:
        scores = warpgroup_mma(q1, k1.index(slot).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _halved(sums, WIDTH: gl.constexpr):
    low, high = sums.reshape([64, 2, WIDTH]).permute((0, 2, 1)).split()
    return low + high


@gluon.jit
def _lane_sums(weights):
    """[64, 4]: what a thread has of a row, added up as in `prompt_attention_triton`; the four meet at the end."""
    even, odd = weights.reshape([64, TILE // 2, 2]).split()
    return _halved(_halved(_halved(_halved(even + odd, 32), 16), 8), 4)


@gluon.jit
def _soften(scores, top, total, key, asked, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """As in `prompt_attention_triton._step`."""
    if MASKED:
        scores = gl.where(key[None, :] <= asked[:, None], scores, float("-inf"))
    most = gl.max(scores, axis=1) * SCALE
    new_top = gl.where(most > top + LEEWAY, most, top)
    like = gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, like + SCALE, like - new_top[:, None]))
    fade = gl.exp2(top - new_top)
    sums = _lane_sums(weights)
    share = gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    return weights, new_top, gl.fma(total, gl.zeros_like(sums) + share, sums), fade


@gluon.jit
def _packed(weights, DTYPE: gl.constexpr):
    """Rounded in pairs: of single ones the assembler makes pairs the wrong way round, and turns them again."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _faded(mixed, fade):
    """Of a thread's numbers, two by two, one pair is of one row and the next of another."""
    COUNT: gl.constexpr = mixed.shape[1] // 2
    share = gl.zeros_like(mixed) + gl.convert_layout(fade, gl.SliceLayout(1, mixed.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        _fade_text(COUNT), _fade_operands(COUNT), [mixed, share], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def _clear(tile, beyond, LANES: gl.constexpr):
    """Zeros in the rows of a tile from `beyond` on: nobody has written those cells, and nothing times nothing may be
    NaN. Both groups do so."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // LANES, LANES // 8], [4, 1], [1, 0])
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where((row < beyond)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _step(
    q0, q1, weights, fade, mixed0, mixed1, top, total, zero, tiles, bars, count, key, asked,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr, LANES_1: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of one tile, and the values of the tile before it, which are there.

    The other group's turn comes when both are asked for: by then its own are in front. The wait for this tile's values
    stands where it does because the assembler moves no wait for products across it: without, the products with values
    would be waited for before the softmax."""
    _, _, k0, k1, v0, v1 = tiles
    _, _, k_full, v_full, done, turns = bars
    slot, v_slot = slot_of(count, K_SLOTS), slot_of(count - 1, V_SLOTS)
    mbarrier.wait(k_full.index(slot), phase_of(count, K_SLOTS))
    if GROUPS == 2:
        mbarrier.wait(turns.index(WHICH), count & 1)
    scores = _score(q0, q1, k0, k1, slot, zero, LANES_1)
    mixed0 = _faded(mixed0, fade)
    if LANES_1:
        mixed1 = _faded(mixed1, fade)
    mixed0 = warpgroup_mma(weights, v0.index(v_slot), mixed0, is_async=True)
    if LANES_1:
        mixed1 = warpgroup_mma(weights, v1.index(v_slot), mixed1, is_async=True)
    if GROUPS == 2:
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(2 if LANES_1 else 1, [scores])
    mbarrier.arrive(done.index(K_SLOTS * WHICH + slot), count=1)
    new_weights, top, total, new_fade = _soften(scores, top, total, key, asked, SCALE, MASKED)
    new_weights = gl.convert_layout(_packed(new_weights, v0.dtype), weights.type.layout)
    mbarrier.wait(v_full.index(slot_of(count, V_SLOTS)), phase_of(count, V_SLOTS))
    if LANES_1:
        mixed0, mixed1 = warpgroup_mma_wait(0, [mixed0, mixed1])
    else:
        mixed0 = warpgroup_mma_wait(0, [mixed0])
    return new_weights, new_fade, mixed0, mixed1, top, total


@gluon.jit
def _write(mixed, total, out_ptr, first, live, out_stride, lane):
    LAYOUT: gl.constexpr = mixed.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    at = lane + gl.arange(0, mixed.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    to = out_ptr + (first + row).to(gl.int64)[:, None] * out_stride + at[None, :]
    share = mixed * gl.convert_layout(1.0 / total, gl.SliceLayout(1, LAYOUT))[:, None]
    gl.store(to, share.to(out_ptr.dtype.element_ty), mask=(row < live)[:, None] & (at >= 0)[None, :])


@gluon.jit
def _attend(
    out_ptr, tiles, bars, letters, letter, out_stride, count, q_phase,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr, GROUPS: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """One job for one group of warps; returns how many tiles it has seen, of this job and `count` of those before."""
    WIDE_1: gl.constexpr = LANES_1 if LANES_1 else 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    MMA_0: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LANES_0, 16])
    MMA_1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE_1, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=0, k_width=2)
    LEFT_0: gl.constexpr = gl.DotOperandLayout(parent=MMA_0, operand_index=0, k_width=2)
    q_tile0, q_tile1, k0, k1, v0, v1 = tiles
    q_full, q_empty, k_full, v_full, done, turns = bars
    past = WHICH * 64
    live, position = read(letters, letter), read(letters, letter + 2)
    end = position + live
    all_tiles = (end + TILE - 1) // TILE
    own = gl.maximum(gl.minimum(live - past, 64), 0)
    begin = position + past
    own_tiles = gl.where(own > 0, (begin + own + TILE - 1) // TILE, 0)
    mbarrier.wait(q_full, q_phase)
    if own > 0:
        q0 = q_tile0.index(WHICH).load(LEFT)
        q1 = q0
        if LANES_1:
            q1 = q_tile1.index(WHICH).load(LEFT)
        asked = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        inside = gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA))
        zero = gl.zeros([64, TILE], gl.float32, layout=MMA)
        mixed0 = gl.zeros([64, LANES_0], gl.float32, layout=MMA_0)
        mixed1 = gl.zeros([64, WIDE_1], gl.float32, layout=MMA_1)
        top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
        total = gl.zeros_like(_lane_sums(zero))

        slot = slot_of(count, K_SLOTS)
        mbarrier.wait(k_full.index(slot), phase_of(count, K_SLOTS))
        if GROUPS == 2:
            mbarrier.wait(turns.index(WHICH), count & 1)
        scores = _score(q0, q1, k0, k1, slot, zero, LANES_1)
        if GROUPS == 2:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(0, [scores])
        # Not before: a barrier doesn't wait for loads under way, and where jobs are short the next q comes at once.
        mbarrier.arrive(q_empty, count=1)
        mbarrier.arrive(done.index(K_SLOTS * WHICH + slot), count=1)
        weights, top, total, fade = _soften(scores, top, total, inside, asked, SCALE, True)
        weights = gl.convert_layout(_packed(weights, v0.dtype), LEFT_0)
        mbarrier.wait(v_full.index(slot_of(count, V_SLOTS)), phase_of(count, V_SLOTS))
        open_tiles = gl.minimum((begin + 1) // TILE, own_tiles)
        for tile in range(1, open_tiles):
            weights, fade, mixed0, mixed1, top, total = _step(
                q0, q1, weights, fade, mixed0, mixed1, top, total, zero, tiles, bars,
                count + tile, tile * TILE + inside, asked, WHICH, GROUPS, SCALE, LANES_1, False,
            )  # fmt: skip
        for tile in range(gl.maximum(open_tiles, 1), own_tiles):
            weights, fade, mixed0, mixed1, top, total = _step(
                q0, q1, weights, fade, mixed0, mixed1, top, total, zero, tiles, bars,
                count + tile, tile * TILE + inside, asked, WHICH, GROUPS, SCALE, LANES_1, True,
            )  # fmt: skip
        total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, MMA_0))
        v_slot = slot_of(count + own_tiles - 1, V_SLOTS)
        mixed0 = _faded(mixed0, fade)
        if LANES_1:
            mixed1 = _faded(mixed1, fade)
        beyond = end - (own_tiles - 1) * TILE
        if beyond < TILE:
            _clear(v0.index(v_slot), beyond, LANES_0)
            if LANES_1:
                _clear(v1.index(v_slot), beyond, LANES_1)
            fence_async_shared()
            thread_barrier()
        # Read again: a number held all the time is a register that the loops lack.
        own = read(letters, letter) - past
        row, lane = read(letters, letter + 1) + past, read(letters, letter + 3) * HEAD_DIM
        mixed0 = warpgroup_mma(weights, v0.index(v_slot), mixed0)
        _write(mixed0, total, out_ptr, row, own, out_stride, lane)
        if LANES_1:
            mixed1 = warpgroup_mma(weights, v1.index(v_slot), mixed1)
            _write(mixed1, total, out_ptr, row, own, out_stride, lane + LANES_0)
    else:
        mbarrier.arrive(q_empty, count=1)
    for tile in range(count + own_tiles, count + all_tiles):  # that only the other group sees
        slot = slot_of(tile, K_SLOTS)
        # Not before it is there: had the producer not looked since this slot's tile before, it would see two phases as
        # none, and wait for ever.
        mbarrier.wait(k_full.index(slot), phase_of(tile, K_SLOTS))
        if GROUPS == 2:
            mbarrier.wait(turns.index(WHICH), tile & 1)
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        mbarrier.arrive(done.index(K_SLOTS * WHICH + slot), count=1)
    return count + all_tiles


@gluon.jit
def _consume(
    held, WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr,
    GROUPS: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Four warps: jobs as they come by mail, until one comes without rows."""
    out_ptr, tiles, bars, mail, out_stride = held
    letters, mail_full, mail_empty = mail
    count = 0
    at = 0
    live = 1
    while live > 0:
        letter = at & 1
        mbarrier.wait(mail_full.index(letter), (at >> 1) & 1)
        live = read(letters, 4 * letter)
        if live > 0:
            count = _attend(
                out_ptr, tiles, bars, letters, 4 * letter, out_stride, count, at & 1,
                WHICH, HEAD_DIM, LANES_0, LANES_1, GROUPS, SCALE,
            )  # fmt: skip
            mbarrier.arrive(mail_empty.index(letter), count=1)
        at += 1


@gluon.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["firsts_ptr", "counts_ptr", "slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def hopper_prompt_kernel(
    q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, out_ptr, items_ptr, total_ptr, firsts_ptr, counts_ptr,
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, taken_ptr, share_ptr,
    out_stride, table_stride, slots_per_page, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr,
    GROUPS: gl.constexpr, PAGE_TOKENS: gl.constexpr, DTYPE: gl.constexpr, SCALE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Any grid of one dimension. Items are of 64 * GROUPS rows; head_dim is LANES_0 (64 or 128) + LANES_1 (0 or 32).
    With SHARED the first share[0] programs do the work, and the launch that follows may start once they have begun."""
    programs = gl.minimum(gl.num_programs(0), gl.load(total_ptr) * HEADS)
    if SHARED:
        gdc_launch_dependents()
        programs = gl.minimum(programs, gl.load(share_ptr))
    if gl.program_id(0) >= programs:
        return
    LAYOUT_0: gl.constexpr = k_desc0.layout
    LAYOUT_1: gl.constexpr = k_desc1.layout
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile0 = gl.allocate_shared_memory(DTYPE, [GROUPS, 64, LANES_0], LAYOUT_0)
    k0 = gl.allocate_shared_memory(DTYPE, [K_SLOTS, TILE, LANES_0], LAYOUT_0)
    v0 = gl.allocate_shared_memory(DTYPE, [V_SLOTS, TILE, LANES_0], LAYOUT_0)
    q_tile1, k1, v1 = q_tile0, k0, v0
    if LANES_1:
        q_tile1 = gl.allocate_shared_memory(DTYPE, [GROUPS, 64, LANES_1], LAYOUT_1)
        k1 = gl.allocate_shared_memory(DTYPE, [K_SLOTS, TILE, LANES_1], LAYOUT_1)
        v1 = gl.allocate_shared_memory(DTYPE, [V_SLOTS, TILE, LANES_1], LAYOUT_1)
    letters = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [GROUPS * K_SLOTS, 1], BAR)  # of a tile's keys, for each group
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR), gl.allocate_shared_memory(gl.int64, [1], BAR)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    # None where nobody takes turns: the place of a barrier that nobody waits for is given to others, who were seen to
    # find the barrier's word there after the card had been with another process.
    turns = mail_empty
    if GROUPS == 2:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
        for group in gl.static_range(GROUPS):
            mbarrier.init(turns.index(group), count=1)
        mbarrier.arrive(turns.index(0), count=1)
    for slot in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(slot), count=1)
    for slot in gl.static_range(GROUPS * K_SLOTS):
        mbarrier.init(done.index(slot), count=1)
    for slot in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(slot), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for letter in gl.static_range(2):
        mbarrier.init(mail_full.index(letter), count=1)
        mbarrier.init(mail_empty.index(letter), count=GROUPS)
    fence_async_shared()
    tiles = (q_tile0, q_tile1, k0, k1, v0, v1)
    bars = (q_full, q_empty, k_full, v_full, done, turns)
    mail = (letters, mail_full, mail_empty)
    descs = ((q_desc0, q_desc1), (k_desc0, k_desc1), (v_desc0, v_desc1))
    work = (items_ptr, total_ptr, firsts_ptr, counts_ptr, taken_ptr, programs)
    rows = (slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, table_stride, slots_per_page, layer)
    held = (out_ptr, tiles, bars, mail, out_stride)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (held, gl.constexpr(0), HEAD_DIM, LANES_0, LANES_1, GROUPS, SCALE)),
                (_consume, (held, gl.constexpr(1), HEAD_DIM, LANES_0, LANES_1, GROUPS, SCALE)),
                (produce, (
                    descs, tiles, bars, mail, work, rows,
                    HEADS, KV_HEADS, HEAD_DIM, LANES_0, LANES_1, GROUPS, PAGE_TOKENS,
                )),
            ],
            [4, 1],
            [WIDE_REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (held, gl.constexpr(0), HEAD_DIM, LANES_0, LANES_1, GROUPS, SCALE)),
                (produce, (
                    descs, tiles, bars, mail, work, rows,
                    HEADS, KV_HEADS, HEAD_DIM, LANES_0, LANES_1, GROUPS, PAGE_TOKENS,
                )),
            ],
            [1],
            [FEW_REGISTERS],
        )  # fmt: skip


def takes(width: int, page_tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is written for heads so wide, such pages, and this card."""
    return (
        multiplies_in_groups(device)
        and width in LANES
        and page_tokens % BOX_TOKENS == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def item_rows(rows: int, heads: int, device: torch.device) -> int:
    """Rows of one work item where a tick has so many: for two groups, unless halves still go round only once."""
    return ROWS[heads * rows > GROUP_ROWS * multiprocessors(device)]


def _box(rows: Tensor, height: int, lanes: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE[lanes], element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(rows, [height, lanes], layout)


def hopper_prompt_attention(
    q: Tensor,
    heads: int,
    rows: RowAddresses,
    chunks: PromptChunks,
    k_pool: Tensor,
    v_pool: Tensor,
    layer: int,
    *,
    out: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """As `prompt_attention`, for what it `takes` and items of either number of ROWS. With `share` (`share_triton`) on
    so many multiprocessors only, and the decode attention that is launched next runs on the others."""
    _, page_tokens, kv_heads, width = k_pool.shape
    groups = chunks.query_tile // GROUP_ROWS
    assert chunks.query_tile in ROWS, chunks.query_tile
    lanes_0, lanes_1 = LANES[width]
    sources = [(q, GROUP_ROWS), *((pool.view(-1, kv_heads * width), BOX_TOKENS) for pool in (k_pool, v_pool))]
    boxes = [_box(source, height, lanes) for source, height in sources for lanes in (64, lanes_1 or 64)]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    hopper_prompt_kernel[(min(multiprocessors(q.device), heads * chunks.work.most),)](
        *boxes,
        out,
        chunks.work.items,
        chunks.work.total,
        chunks.firsts,
        chunks.counts,
        rows.slots,
        rows.positions,
        rows.plane_slots,
        rows.page_table,
        chunks.work.taken,
        chunks.work.taken if share is None else share,
        out.stride(0),
        rows.page_table.stride(0),
        rows.slots_per_page,
        layer,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=width,
        LANES_0=lanes_0,
        LANES_1=lanes_1,
        GROUPS=groups,
        PAGE_TOKENS=page_tokens,
        DTYPE=TL_DTYPES[q.dtype],
        SCALE=width**-0.5 * 1.4426950408889634,
        SHARED=share is not None,
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out
