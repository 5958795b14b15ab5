# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of prompt rows for Hopper: one warp brings keys and values, two groups of four warps take turns with them.

Owns one Gluon kernel with the sums of `prompt_attention_triton`, its twin, in the same order: the same KV tiles, the
same layout of a tile's scores, values of a tile summed by themselves. One warp of a program copies pages into a ring by
the tensor memory accelerator, far ahead. Each group of four has 64 query rows of an item; it asks for the scores of
tile j and the values of tile j - 1 together, and does the softmax of tile j while the matrix units still work on those
values or for the other group. Programs take one job (an item and a head) after the other, the longest first, so that
what the next one reads comes while one ends. It must not know which traversal it serves.
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

from epicycle.engine.kernels.gluon_common import HAS_REINTERPRET, load_tile, thread_barrier
from epicycle.engine.kernels.prompt_attention_triton import PromptChunks
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_common import TL_DTYPES, multiplies_in_groups, multiprocessors

BOX_TOKENS = 16
BOX = gl.constexpr(BOX_TOKENS)  # positions of one copy: no page is shorter
TILE = gl.constexpr(64)  # positions of one step of the online softmax: the twin's
GROUP_ROWS = 64
ROWS = (GROUP_ROWS, 2 * GROUP_ROWS)  # of one work item: for one group of warps, for two
LANES = {64: (64, 0), 96: (64, 32), 128: (128, 0)}  # how a head lies in shared memory
SWIZZLE = {32: 64, 64: 128}  # bytes, by lanes of a box
STAGES = 4
REGISTERS = 168  # of a thread, while warps don't differ; then those that multiply take most
WIDE_REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.jit
def _boxes(ring, COUNT: gl.constexpr, HEIGHT: gl.constexpr, LANES: gl.constexpr):
    """A ring cut in boxes [COUNT, HEIGHT, LANES]. A tile of 128 lanes lies there as two of 64, one behind the other."""
    if HAS_REINTERPRET:
        return ring.reinterpret(ring.dtype, [COUNT, HEIGHT, LANES], ring.layout)
    else:
        return ring._reinterpret(ring.dtype, [COUNT, HEIGHT, LANES], ring.layout)


@gluon.jit
def _post(letters, place, value):
    letters.index(place).store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _read(letters, place):
    return gl.sum(letters.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _slot(count, STAGES: gl.constexpr):
    """Of the ring, for the tile that comes after `count` others; STAGES is 2 or 4."""
    return count & (STAGES - 1)


@gluon.jit
def _phase(count, STAGES: gl.constexpr):
    return (count >> (STAGES // 2)) & 1


@gluon.jit
def _page(table_at, key, end, PAGE_TOKENS: gl.constexpr):
    return gl.load(table_at + key // PAGE_TOKENS, mask=key < end, other=0)


@gluon.jit
def _cell(page, place, slots_per_page, key, PAGE_TOKENS: gl.constexpr):
    return (page * slots_per_page + place) * PAGE_TOKENS + key % PAGE_TOKENS


@gluon.jit
def _bring(
    desc0, desc1, boxes0, boxes1, full, slot, c0, c1, c2, c3, lane, LANES_0: gl.constexpr, LANES_1: gl.constexpr
):
    """A tile of keys or values, in four boxes of cells, on its way to one slot of the ring."""
    done = full.index(slot)
    mbarrier.expect(done, TILE * (LANES_0 + LANES_1) * 2)
    for half in gl.static_range(LANES_0 // 64):
        first = slot * (LANES_0 // 16) + 4 * half
        load_tile(desc0, [c0, lane + 64 * half], done, boxes0.index(first))
        load_tile(desc0, [c1, lane + 64 * half], done, boxes0.index(first + 1))
        load_tile(desc0, [c2, lane + 64 * half], done, boxes0.index(first + 2))
        load_tile(desc0, [c3, lane + 64 * half], done, boxes0.index(first + 3))
    if LANES_1:
        load_tile(desc1, [c0, lane + LANES_0], done, boxes1.index(slot * 4))
        load_tile(desc1, [c1, lane + LANES_0], done, boxes1.index(slot * 4 + 1))
        load_tile(desc1, [c2, lane + LANES_0], done, boxes1.index(slot * 4 + 2))
        load_tile(desc1, [c3, lane + LANES_0], done, boxes1.index(slot * 4 + 3))


@gluon.jit
def _produce(
    q_descs, k_descs, v_descs, tiles, bars, mail, items_ptr, total_ptr, firsts_ptr, counts_ptr,
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, taken_ptr, table_stride, slots_per_page, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, PAGE_TOKENS: gl.constexpr,
):  # fmt: skip
    """One warp: deals out jobs, and brings their queries and KV, each tile as soon as all groups have left its slot.

    A program begins with the job of its own number. `taken_ptr` counts the jobs taken after those and the tries that
    failed, which are as many as there are jobs; whoever makes the last try sets it to 0."""
    ROWS: gl.constexpr = 64 * GROUPS
    BOXES: gl.constexpr = STAGES * LANES_0 // 16
    q_desc0, q_desc1 = q_descs
    k_desc0, k_desc1 = k_descs
    v_desc0, v_desc1 = v_descs
    q_tile0, q_tile1, k0, k1, v0, v1 = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    letters, mail_full, mail_empty = mail
    k_boxes0, v_boxes0 = _boxes(k0, BOXES, BOX, 64), _boxes(v0, BOXES, BOX, 64)
    q_boxes0 = _boxes(q_tile0, GROUPS * LANES_0 // 64, 64, 64)
    k_boxes1, v_boxes1 = k_boxes0, v_boxes0
    if LANES_1:
        k_boxes1 = _boxes(k1, STAGES * 4, BOX, LANES_1)
        v_boxes1 = _boxes(v1, STAGES * 4, BOX, LANES_1)
    total = gl.load(total_ptr)
    jobs = total * HEADS
    programs = gl.minimum(gl.num_programs(0), jobs)
    job = gl.program_id(0)
    count = 0
    at = 0
    while job < jobs:
        head, item = job % HEADS, total - 1 - job // HEADS
        chunk, past = gl.load(items_ptr + 2 * item), gl.load(items_ptr + 2 * item + 1) * ROWS
        first = gl.load(firsts_ptr + chunk) + past
        live = gl.minimum(gl.load(counts_ptr + chunk) - past, ROWS)
        position = gl.load(positions_ptr + first)
        place = gl.load(plane_slots_ptr + first) + layer
        table_at = page_table_ptr + gl.load(slots_ptr + first).to(gl.int64) * table_stride
        end = position + live
        p0 = _page(table_at, 0, end, PAGE_TOKENS)
        p1 = _page(table_at, BOX, end, PAGE_TOKENS)
        p2 = _page(table_at, 2 * BOX, end, PAGE_TOKENS)
        p3 = _page(table_at, 3 * BOX, end, PAGE_TOKENS)
        letter = at & 1
        mbarrier.wait(mail_empty.index(letter), ((at >> 1) & 1) ^ 1)
        _post(letters, 4 * letter, live)
        _post(letters, 4 * letter + 1, first)
        _post(letters, 4 * letter + 2, position)
        _post(letters, 4 * letter + 3, head)
        mbarrier.arrive(mail_full.index(letter), count=1)
        mbarrier.wait(q_empty, (at & 1) ^ 1)
        mbarrier.expect(q_full, ROWS * HEAD_DIM * 2)
        for group in gl.static_range(GROUPS):
            row, lane = first + 64 * group, head * HEAD_DIM
            for half in gl.static_range(LANES_0 // 64):
                to = q_boxes0.index(group * (LANES_0 // 64) + half)
                load_tile(q_desc0, [row, lane + 64 * half], q_full, to)
            if LANES_1:
                load_tile(q_desc1, [row, lane + LANES_0], q_full, q_tile1.index(group))
        kv_lane = head // (HEADS // KV_HEADS) * HEAD_DIM
        at += 1
        for start in range(0, end, TILE):
            c0 = _cell(p0, place, slots_per_page, start, PAGE_TOKENS)
            c1 = _cell(p1, place, slots_per_page, start + BOX, PAGE_TOKENS)
            c2 = _cell(p2, place, slots_per_page, start + 2 * BOX, PAGE_TOKENS)
            c3 = _cell(p3, place, slots_per_page, start + 3 * BOX, PAGE_TOKENS)
            coming = start + TILE
            p0 = _page(table_at, coming, end, PAGE_TOKENS)
            p1 = _page(table_at, coming + BOX, end, PAGE_TOKENS)
            p2 = _page(table_at, coming + 2 * BOX, end, PAGE_TOKENS)
            p3 = _page(table_at, coming + 3 * BOX, end, PAGE_TOKENS)
            slot = _slot(count, STAGES)
            phase = _phase(count, STAGES) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            _bring(k_desc0, k_desc1, k_boxes0, k_boxes1, k_full, slot, c0, c1, c2, c3, kv_lane, LANES_0, LANES_1)
            mbarrier.wait(v_empty.index(slot), phase)
            _bring(v_desc0, v_desc1, v_boxes0, v_boxes1, v_full, slot, c0, c1, c2, c3, kv_lane, LANES_0, LANES_1)
            count += 1
        # Not before: whoever ends first is to take the next, and this waits for the ring, not for what it took.
        job = programs + gl.atomic_add(taken_ptr, 1)
    letter = at & 1
    mbarrier.wait(mail_empty.index(letter), ((at >> 1) & 1) ^ 1)
    _post(letters, 4 * letter, 0)
    mbarrier.arrive(mail_full.index(letter), count=1)
    if job == programs + jobs - 1:
        gl.store(taken_ptr, 0)


@gluon.jit
def _score(q0, q1, k0, k1, slot, zero, LANES_1: gl.constexpr):
    scores = warpgroup_mma(q0, k0.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if LANES_1:
        scores = warpgroup_mma(q1, k1.index(slot).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _soften(scores, top, total, key, asked, SCALE: gl.constexpr, MASKED: gl.constexpr):
    """As in `prompt_attention_triton._step`."""
    if MASKED:
        scores = gl.where(key[None, :] <= asked[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1) * SCALE)
    like = gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, like + SCALE, like - new_top[:, None]))
    fade = gl.exp2(top - new_top)
    return weights, new_top, gl.fma(total, fade, gl.sum(weights, axis=1)), fade


@gluon.jit
def _fold(mixed, fresh, fade):
    like = gl.zeros_like(mixed)
    return gl.fma(mixed, like + gl.convert_layout(fade, gl.SliceLayout(1, mixed.type.layout))[:, None], fresh)


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
    q0, q1, weights, fade, mixed0, mixed1, top, total, zero, zero0, zero1, tiles, bars, turns,
    count, has_before, is_last, key, asked,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SCALE: gl.constexpr, LANES_1: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of one tile, whose keys are there, and the values of the tile before it.

    The wait for the next tile's keys stands where it does because the assembler moves no wait for products across it:
    without, those with values would be waited for before the softmax."""
    _, _, k0, k1, v0, v1 = tiles
    _, _, k_full, k_empty, v_full, v_empty = bars
    my_turn, other_turn = turns
    slot, v_slot, next_slot = _slot(count, STAGES), _slot(count - 1, STAGES), _slot(count + 1, STAGES)
    if GROUPS == 2:
        mbarrier.wait(my_turn, count & 1)
    scores = _score(q0, q1, k0, k1, slot, zero, LANES_1)
    mbarrier.wait(v_full.index(v_slot), _phase(count - 1, STAGES))
    fresh0 = warpgroup_mma(weights, v0.index(v_slot), zero0, use_acc=False, is_async=True)
    if LANES_1:
        fresh1 = warpgroup_mma(weights, v1.index(v_slot), zero1, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(2 if LANES_1 else 1, [scores])
    if GROUPS == 2:
        mbarrier.arrive(other_turn, count=1)
    mbarrier.arrive(k_empty.index(slot), count=1)
    mbarrier.arrive(v_empty.index(_slot(count - 2, STAGES)), count=1, pred=has_before)
    new_weights, top, total, new_fade = _soften(scores, top, total, key, asked, SCALE, MASKED)
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    mbarrier.wait(k_full.index(next_slot), _phase(count + 1, STAGES), pred=not is_last)
    if LANES_1:
        fresh0, fresh1 = warpgroup_mma_wait(0, [fresh0, fresh1])
        mixed1 = _fold(mixed1, fresh1, fade)
    else:
        fresh0 = warpgroup_mma_wait(0, [fresh0])
    mixed0 = _fold(mixed0, fresh0, fade)
    return new_weights, new_fade, mixed0, mixed1, top, total


@gluon.jit
def _write(mixed, total, out_ptr, first, live, out_stride, lane):
    LAYOUT: gl.constexpr = mixed.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    at = lane + gl.arange(0, mixed.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    to = out_ptr + (first + row).to(gl.int64)[:, None] * out_stride + at[None, :]
    share = mixed / gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))[:, None]
    gl.store(to, share.to(out_ptr.dtype.element_ty), mask=(row < live)[:, None] & (at >= 0)[None, :])


@gluon.jit
def _attend(
    out_ptr, tiles, bars, turns, letters, letter, out_stride, count, q_phase,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """One job for one group of warps; returns how many tiles it has seen, of this job and `count` of those before."""
    WIDE_1: gl.constexpr = LANES_1 if LANES_1 else 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    MMA_0: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LANES_0, 16])
    MMA_1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE_1, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=0, k_width=2)
    LEFT_0: gl.constexpr = gl.DotOperandLayout(parent=MMA_0, operand_index=0, k_width=2)
    q_tile0, q_tile1, k0, k1, v0, v1 = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    my_turn, other_turn = turns
    past = WHICH * 64
    live, position = _read(letters, letter), _read(letters, letter + 2)
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
        mbarrier.arrive(q_empty, count=1)
        asked = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        inside = gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA))
        zero = gl.zeros([64, TILE], gl.float32, layout=MMA)
        zero0 = gl.zeros([64, LANES_0], gl.float32, layout=MMA_0)
        zero1 = gl.zeros([64, WIDE_1], gl.float32, layout=MMA_1)
        mixed0 = zero0
        mixed1 = zero1
        top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, MMA))

        mbarrier.wait(k_full.index(_slot(count, STAGES)), _phase(count, STAGES))
        if GROUPS == 2:
            mbarrier.wait(my_turn, count & 1)
        scores = _score(q0, q1, k0, k1, _slot(count, STAGES), zero, LANES_1)
        if GROUPS == 2:
            mbarrier.arrive(other_turn, count=1)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_empty.index(_slot(count, STAGES)), count=1)
        weights, top, total, fade = _soften(scores, top, total, inside, asked, SCALE, True)
        weights = gl.convert_layout(weights.to(v0.dtype), LEFT_0)
        mbarrier.wait(k_full.index(_slot(count + 1, STAGES)), _phase(count + 1, STAGES), pred=own_tiles > 1)
        open_tiles = gl.minimum((begin + 1) // TILE, own_tiles)
        for tile in range(1, open_tiles):
            weights, fade, mixed0, mixed1, top, total = _step(
                q0, q1, weights, fade, mixed0, mixed1, top, total, zero, zero0, zero1, tiles, bars, turns,
                count + tile, tile > 1, tile + 1 == own_tiles, tile * TILE + inside, asked,
                GROUPS, STAGES, SCALE, LANES_1, False,
            )  # fmt: skip
        for tile in range(gl.maximum(open_tiles, 1), own_tiles):
            weights, fade, mixed0, mixed1, top, total = _step(
                q0, q1, weights, fade, mixed0, mixed1, top, total, zero, zero0, zero1, tiles, bars, turns,
                count + tile, tile > 1, tile + 1 == own_tiles, tile * TILE + inside, asked,
                GROUPS, STAGES, SCALE, LANES_1, True,
            )  # fmt: skip
        last = count + own_tiles - 1
        v_slot = _slot(last, STAGES)
        mbarrier.wait(v_full.index(v_slot), _phase(last, STAGES))
        beyond = end - (own_tiles - 1) * TILE
        if beyond < TILE:
            _clear(v0.index(v_slot), beyond, LANES_0)
            if LANES_1:
                _clear(v1.index(v_slot), beyond, LANES_1)
            fence_async_shared()
            thread_barrier()
        fresh0 = warpgroup_mma(weights, v0.index(v_slot), zero0, use_acc=False)
        if LANES_1:
            fresh1 = warpgroup_mma(weights, v1.index(v_slot), zero1, use_acc=False)
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        mbarrier.arrive(v_empty.index(_slot(last - 1, STAGES)), count=1, pred=own_tiles > 1)
        # Read again: a number held all the time is a register that the loops lack.
        own = _read(letters, letter) - past
        row, lane = _read(letters, letter + 1) + past, _read(letters, letter + 3) * HEAD_DIM
        _write(_fold(mixed0, fresh0, fade), total, out_ptr, row, own, out_stride, lane)
        if LANES_1:
            _write(_fold(mixed1, fresh1, fade), total, out_ptr, row, own, out_stride, lane + LANES_0)
    else:
        mbarrier.arrive(q_empty, count=1)
    for tile in range(count + own_tiles, count + all_tiles):  # that only the other group sees
        mbarrier.wait(k_full.index(_slot(tile, STAGES)), _phase(tile, STAGES))
        if GROUPS == 2:
            mbarrier.wait(my_turn, tile & 1)
            mbarrier.arrive(other_turn, count=1)
        mbarrier.arrive(k_empty.index(_slot(tile, STAGES)), count=1)
        mbarrier.wait(v_full.index(_slot(tile, STAGES)), _phase(tile, STAGES))
        mbarrier.arrive(v_empty.index(_slot(tile, STAGES)), count=1)
    return count + all_tiles


@gluon.jit
def _consume(
    out_ptr, tiles, bars, turns, mail, out_stride,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Four warps: jobs as they come by mail, until one comes without rows."""
    letters, mail_full, mail_empty = mail
    count = 0
    at = 0
    live = 1
    while live > 0:
        letter = at & 1
        mbarrier.wait(mail_full.index(letter), (at >> 1) & 1)
        live = _read(letters, 4 * letter)
        if live > 0:
            count = _attend(
                out_ptr, tiles, bars, turns, letters, 4 * letter, out_stride, count, at & 1,
                WHICH, HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, SCALE,
            )  # fmt: skip
            mbarrier.arrive(mail_empty.index(letter), count=1)
        at += 1


@gluon.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["firsts_ptr", "counts_ptr", "slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def hopper_prompt_kernel(
    q_desc0, q_desc1, k_desc0, k_desc1, v_desc0, v_desc1, out_ptr, items_ptr, total_ptr, firsts_ptr, counts_ptr,
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, taken_ptr,
    out_stride, table_stride, slots_per_page, layer,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, PAGE_TOKENS: gl.constexpr, DTYPE: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Any grid of one dimension. Items are of 64 * GROUPS rows; head_dim is LANES_0 (64 or 128) + LANES_1 (0 or 32)."""
    if gl.program_id(0) >= gl.load(total_ptr) * HEADS:
        return
    LAYOUT_0: gl.constexpr = k_desc0.layout
    LAYOUT_1: gl.constexpr = k_desc1.layout
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile0 = gl.allocate_shared_memory(DTYPE, [GROUPS, 64, LANES_0], LAYOUT_0)
    k0 = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, LANES_0], LAYOUT_0)
    v0 = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, LANES_0], LAYOUT_0)
    q_tile1, k1, v1 = q_tile0, k0, v0
    if LANES_1:
        q_tile1 = gl.allocate_shared_memory(DTYPE, [GROUPS, 64, LANES_1], LAYOUT_1)
        k1 = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, LANES_1], LAYOUT_1)
        v1 = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, LANES_1], LAYOUT_1)
    letters = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR), gl.allocate_shared_memory(gl.int64, [1], BAR)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    turn0, turn1 = gl.allocate_shared_memory(gl.int64, [1], BAR), gl.allocate_shared_memory(gl.int64, [1], BAR)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for letter in gl.static_range(2):
        mbarrier.init(mail_full.index(letter), count=1)
        mbarrier.init(mail_empty.index(letter), count=GROUPS)
    mbarrier.init(turn0, count=1)
    mbarrier.init(turn1, count=1)
    if GROUPS == 2:
        mbarrier.arrive(turn0, count=1)
    fence_async_shared()
    tiles = (q_tile0, q_tile1, k0, k1, v0, v1)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    mail = (letters, mail_full, mail_empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, tiles, bars, (turn0, turn1), mail, out_stride,
                    gl.constexpr(0), HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, SCALE,
                )),
                (_consume, (
                    out_ptr, tiles, bars, (turn1, turn0), mail, out_stride,
                    gl.constexpr(1), HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, SCALE,
                )),
                (_produce, (
                    (q_desc0, q_desc1), (k_desc0, k_desc1), (v_desc0, v_desc1), tiles, bars, mail,
                    items_ptr, total_ptr, firsts_ptr, counts_ptr, slots_ptr, positions_ptr, plane_slots_ptr,
                    page_table_ptr, taken_ptr, table_stride, slots_per_page, layer,
                    HEADS, KV_HEADS, HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, PAGE_TOKENS,
                )),
            ],
            [4, 1],
            [WIDE_REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, tiles, bars, (turn0, turn1), mail, out_stride,
                    gl.constexpr(0), HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, SCALE,
                )),
                (_produce, (
                    (q_desc0, q_desc1), (k_desc0, k_desc1), (v_desc0, v_desc1), tiles, bars, mail,
                    items_ptr, total_ptr, firsts_ptr, counts_ptr, slots_ptr, positions_ptr, plane_slots_ptr,
                    page_table_ptr, taken_ptr, table_stride, slots_per_page, layer,
                    HEADS, KV_HEADS, HEAD_DIM, LANES_0, LANES_1, GROUPS, STAGES, PAGE_TOKENS,
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
) -> Tensor:
    """As `prompt_attention`, for what it `takes` and items of either number of ROWS."""
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
        STAGES=STAGES,
        PAGE_TOKENS=page_tokens,
        DTYPE=TL_DTYPES[q.dtype],
        SCALE=width**-0.5 * 1.4426950408889634,
        enable_fp_fusion=True,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out
