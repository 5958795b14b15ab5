# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The warp that brings queries, keys and values to prompt attention for Hopper, and what it shares with those who read.

Owns rings in shared memory, the letters that say which job comes, and the order in which jobs are taken. It must not
know what is done with what it brings.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from epicycle.engine.kernels.gluon_common import HAS_REINTERPRET, load_tile

BOX_TOKENS = 16
BOX = gl.constexpr(BOX_TOKENS)  # positions of one copy: no page is shorter
TILE = gl.constexpr(128)  # positions of one step of the online softmax: the twin's
K_SLOTS = gl.constexpr(2)
V_SLOTS = gl.constexpr(4)  # read until a step later, and known to be free another one later


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
def read(letters, place):
    return gl.sum(letters.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def slot_of(count, SLOTS: gl.constexpr):
    """Of a ring of 2 or 4, for the tile that comes after `count` others."""
    return count & (SLOTS - 1)


@gluon.jit
def phase_of(count, SLOTS: gl.constexpr):
    return (count >> (SLOTS // 2)) & 1


@gluon.jit
def _page(table_at, key, end, PAGE_TOKENS: gl.constexpr):
    return gl.load(table_at + key // PAGE_TOKENS, mask=key < end, other=0)


@gluon.jit
def _bring(
    descs, rings, full, slot, pages, place, slots_per_page, start, lane,
    LANES_0: gl.constexpr, LANES_1: gl.constexpr, PAGE_TOKENS: gl.constexpr,
):  # fmt: skip
    """A tile of keys or values, in boxes of cells, on its way to one slot of a ring."""
    PARTS: gl.constexpr = TILE // BOX
    done = full.index(slot)
    mbarrier.expect(done, TILE * (LANES_0 + LANES_1) * 2)
    for part in gl.static_range(PARTS):
        cell = (pages[part] * slots_per_page + place) * PAGE_TOKENS + (start + part * BOX) % PAGE_TOKENS
        for half in gl.static_range(LANES_0 // 64):
            to = rings[0].index((slot * (LANES_0 // 64) + half) * PARTS + part)
            load_tile(descs[0], [cell, lane + 64 * half], done, to)
        if LANES_1:
            load_tile(descs[1], [cell, lane + LANES_0], done, rings[1].index(slot * PARTS + part))


@gluon.jit
def _order(job, total, HEADS: gl.constexpr):
    """Head and item of a job: the longest item first, for one half of the heads and then for the other. Those who work
    at the same time read fewer heads' KV that way, and more of it comes from the cache."""
    HALF: gl.constexpr = HEADS // 2
    is_second = job >= HALF * total
    rank = gl.where(is_second, job - HALF * total, job)
    heads = gl.where(is_second, HEADS - HALF, HALF)
    return rank % heads + gl.where(is_second, HALF, 0), total - 1 - rank // heads


@gluon.jit
def produce(
    descs, tiles, bars, mail, work, rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LANES_0: gl.constexpr, LANES_1: gl.constexpr,
    GROUPS: gl.constexpr, PAGE_TOKENS: gl.constexpr,
):  # fmt: skip
    """One warp: deals out jobs, and brings their queries and KV, each tile as soon as all groups have left its slots.

    A program begins with the job of its own number. `taken_ptr` counts the jobs taken after those and the tries that
    failed, which are as many as there are jobs; whoever makes the last try sets it to 0."""
    ROWS: gl.constexpr = 64 * GROUPS
    PARTS: gl.constexpr = TILE // BOX
    items_ptr, total_ptr, firsts_ptr, counts_ptr, taken_ptr, programs = work
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, table_stride, slots_per_page, layer = rows
    q_descs, k_descs, v_descs = descs
    q_tile0, q_tile1, k0, k1, v0, v1 = tiles
    q_full, q_empty, k_full, v_full, done, _ = bars
    letters, mail_full, mail_empty = mail
    k_rings = (_boxes(k0, K_SLOTS * PARTS * LANES_0 // 64, BOX, 64), k1)
    v_rings = (_boxes(v0, V_SLOTS * PARTS * LANES_0 // 64, BOX, 64), v1)
    q_boxes0 = _boxes(q_tile0, GROUPS * LANES_0 // 64, 64, 64)
    if LANES_1:
        k_rings = (k_rings[0], _boxes(k1, K_SLOTS * PARTS, BOX, LANES_1))
        v_rings = (v_rings[0], _boxes(v1, V_SLOTS * PARTS, BOX, LANES_1))
    total = gl.load(total_ptr)
    jobs = total * HEADS
    job = gl.program_id(0)
    count = 0
    at = 0
    while job < jobs:
        head, item = _order(job, total, HEADS)
        chunk, past = gl.load(items_ptr + 2 * item), gl.load(items_ptr + 2 * item + 1) * ROWS
        first = gl.load(firsts_ptr + chunk) + past
        live = gl.minimum(gl.load(counts_ptr + chunk) - past, ROWS)
        position = gl.load(positions_ptr + first)
        place = gl.load(plane_slots_ptr + first) + layer
        table_at = page_table_ptr + gl.load(slots_ptr + first).to(gl.int64) * table_stride
        end = position + live
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
                load_tile(q_descs[0], [row, lane + 64 * half], q_full, to)
            if LANES_1:
                load_tile(q_descs[1], [row, lane + LANES_0], q_full, q_tile1.index(group))
        kv_lane = head // (HEADS // KV_HEADS) * HEAD_DIM
        at += 1
        for start in range(0, end, TILE):
            p0 = _page(table_at, start, end, PAGE_TOKENS)
            p1 = _page(table_at, start + BOX, end, PAGE_TOKENS)
            p2 = _page(table_at, start + 2 * BOX, end, PAGE_TOKENS)
            p3 = _page(table_at, start + 3 * BOX, end, PAGE_TOKENS)
            p4 = _page(table_at, start + 4 * BOX, end, PAGE_TOKENS)
            p5 = _page(table_at, start + 5 * BOX, end, PAGE_TOKENS)
            p6 = _page(table_at, start + 6 * BOX, end, PAGE_TOKENS)
            p7 = _page(table_at, start + 7 * BOX, end, PAGE_TOKENS)
            pages = (p0, p1, p2, p3, p4, p5, p6, p7)
            # A group that is done with a tile's keys has left the values of two tiles before it.
            slot = slot_of(count, K_SLOTS)
            for group in gl.static_range(GROUPS):
                mbarrier.wait(done.index(K_SLOTS * group + slot), phase_of(count, K_SLOTS) ^ 1)
            _bring(
                k_descs, k_rings, k_full, slot, pages, place, slots_per_page, start, kv_lane,
                LANES_0, LANES_1, PAGE_TOKENS,
            )  # fmt: skip
            _bring(
                v_descs, v_rings, v_full, slot_of(count, V_SLOTS), pages, place, slots_per_page, start, kv_lane,
                LANES_0, LANES_1, PAGE_TOKENS,
            )  # fmt: skip
            count += 1
        # Not before: whoever ends first is to take the next, and this waits for the ring, not for what it took.
        job = programs + gl.atomic_add(taken_ptr, 1)
    letter = at & 1
    mbarrier.wait(mail_empty.index(letter), ((at >> 1) & 1) ^ 1)
    _post(letters, 4 * letter, 0)
    mbarrier.arrive(mail_full.index(letter), count=1)
    if job == programs + jobs - 1:
        gl.store(taken_ptr, 0)
