# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of one decode row that begins before its QKV product is there.

Owns one Gluon kernel with the sums of `decode_attention_triton`, its twin, in the same order and the same layouts. Keys
and values of earlier positions come into shared memory while the product still runs; the row's own key and value never
make the detour through memory. What the work list holds, and how runs are added up, is as there. It must not know
which traversal it serves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.gluon_common import load_later, thread_barrier
from epicycle.engine.kernels.rope_kv_triton import load_rotated
from epicycle.engine.kernels.runs_triton import COLUMNS

AT_ONCE = gl.constexpr(16)


@gluon.jit
def _ask_tile(
    k_stage, v_stage, k_pool_ptr, v_pool_ptr, table_at, start, end, place, slots_per_page, kv_head,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Keys and values at start .. end, as many as a stage holds, on their way; zeros from `end` on."""
    key = start + gl.arange(0, k_stage.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, k_stage.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    page = gl.load(table_at + key // PAGE_TOKENS, mask=key < end, other=0)
    cell = (page.to(gl.int64) * slots_per_page + place) * PAGE_TOKENS + key % PAGE_TOKENS
    at = ((cell * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + lane[None, :]
    mask = (key < end)[:, None] & (lane < HEAD_DIM)[None, :]
    load_later(k_stage, k_pool_ptr + at, mask=mask)
    load_later(v_stage, v_pool_ptr + at, mask=mask)


@gluon.jit
def _combine(
    sums_ptr, stats_ptr, out_at, first, pieces, head,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """`pieces_triton.combine_pieces` in tiles of 16 pieces, for rows of many: their sums are added across threads."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    part = gl.arange(0, AT_ONCE, layout=LINE)
    beside = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, BLOCK))
    lane = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, BLOCK))
    entry = (first + part).to(gl.int64) * HEADS + head
    row = (first + beside).to(gl.int64) * HEADS + head
    tops = gl.load(stats_ptr + 2 * entry, mask=part < pieces, other=float("-inf"))
    totals = gl.load(stats_ptr + 2 * entry + 1, mask=part < pieces, other=0.0)
    row_tops = gl.load(stats_ptr + 2 * row, mask=beside < pieces, other=float("-inf"))
    mask = (beside < pieces)[:, None] & (lane < HEAD_DIM)[None, :]
    held = gl.load(sums_ptr + row[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
    top = tops
    for start in range(AT_ONCE, pieces, AT_ONCE):
        at = stats_ptr + 2 * (entry + start * HEADS)
        top = gl.maximum(top, gl.load(at, mask=start + part < pieces, other=float("-inf")))
    highest = gl.max(top, axis=0)
    total = gl.sum(gl.exp2(tops - highest).to(gl.float64) * totals, axis=0)
    mixed = gl.sum(gl.exp2(row_tops - highest).to(gl.float64)[:, None] * held, axis=0)
    for start in range(AT_ONCE, pieces, AT_ONCE):
        entries, rows = entry + start * HEADS, row + start * HEADS
        tops = gl.load(stats_ptr + 2 * entries, mask=start + part < pieces, other=float("-inf"))
        totals = gl.load(stats_ptr + 2 * entries + 1, mask=start + part < pieces, other=0.0)
        row_tops = gl.load(stats_ptr + 2 * rows, mask=start + beside < pieces, other=float("-inf"))
        mask = (start + beside < pieces)[:, None] & (lane < HEAD_DIM)[None, :]
        held = gl.load(sums_ptr + rows[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
        total += gl.sum(gl.exp2(tops - highest).to(gl.float64) * totals, axis=0)
        mixed += gl.sum(gl.exp2(row_tops - highest).to(gl.float64)[:, None] * held, axis=0)
    share = mixed.to(gl.float32) / total.to(gl.float32)
    gl.store(out_at + lane, share.to(DTYPE), mask=lane < HEAD_DIM)


@gluon.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def early_decode_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, sums_ptr, stats_ptr, tickets_ptr, items_ptr, total_ptr, programs_ptr,
    bias_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr,
    q_stride, out_stride, table_stride, turn_stride, slots_per_page, layer, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_G: gl.constexpr, BLOCK_T: gl.constexpr, PIECE_T: gl.constexpr, PAGE_TOKENS: gl.constexpr,
    PAIRS: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `decode_attention_triton.decode_kernel`, FUSED, of runs that all have pieces: those of one row do. The list,
    addresses and all KV but the rows' own were complete before the launch before this one began."""
    gdc_launch_dependents()
    GROUP: gl.constexpr = HEADS // KV_HEADS
    STAGES: gl.constexpr = 2
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=0, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=1, k_width=2)
    HEAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    jobs, programs = gl.load(total_ptr) * KV_HEADS, gl.minimum(gl.load(programs_ptr), gl.num_programs(0))
    if gl.program_id(0) >= gl.maximum(gl.minimum(jobs, programs), 1):
        return
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_T, BLOCK_D], SHARED)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_T, BLOCK_D], SHARED)
    for job in range(gl.program_id(0), jobs, programs):
        kv_head, item = job % KV_HEADS, items_ptr + job // KV_HEADS * COLUMNS
        row, begin, run_tokens = gl.load(item), PIECE_T * gl.load(item + 1), PIECE_T * gl.load(item + 2)
        first_place, runs = gl.load(item + 3), gl.load(item + 4)
        slot, position = gl.load(slots_ptr + row), gl.load(positions_ptr + row)
        place = gl.load(plane_slots_ptr + row) + layer
        table_at = page_table_ptr + slot.to(gl.int64) * table_stride
        length = position + 1
        end = gl.minimum(begin + run_tokens, length)
        for stage in gl.static_range(STAGES):
            start = begin + stage * BLOCK_T
            if start < end:
                _ask_tile(
                    k_ring.index(stage), v_ring.index(stage), k_pool_ptr, v_pool_ptr, table_at, start, end, place,
                    slots_per_page, kv_head, KV_HEADS, HEAD_DIM, PAGE_TOKENS, COPY,
                )  # fmt: skip
            async_copy.commit_group()
        gdc_wait()

        q_at = q_ptr + row.to(gl.int64) * q_stride
        cos_at = cos_ptr + position.to(gl.int64) * turn_stride
        sin_at = sin_ptr + position.to(gl.int64) * turn_stride
        lane = gl.arange(0, BLOCK_D, layout=LINE)
        k_at = q_at + (HEADS + kv_head) * HEAD_DIM
        member = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, HEAD))
        lanes = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, HEAD))[None, :]
        head = (kv_head * GROUP + member)[:, None]
        q_mask = (member < GROUP)[:, None] & (lanes < HEAD_DIM)
        q = load_rotated(
            q_at + head * HEAD_DIM, bias_ptr + head * HEAD_DIM, cos_at, sin_at, lanes, q_mask,
            HEAD_DIM, PAIRS, HAS_BIAS, DTYPE,
        )  # fmt: skip
        k_new = load_rotated(
            k_at, bias_ptr + (HEADS + kv_head) * HEAD_DIM, cos_at, sin_at, lane, lane < HEAD_DIM,
            HEAD_DIM, PAIRS, HAS_BIAS, DTYPE,
        )  # fmt: skip
        v_new = gl.load(k_at + KV_HEADS * HEAD_DIM + lane, mask=lane < HEAD_DIM, other=0.0)
        if end == length:
            page = gl.load(table_at + position // PAGE_TOKENS)
            cell = (page.to(gl.int64) * slots_per_page + place) * PAGE_TOKENS + position % PAGE_TOKENS
            to = (cell * KV_HEADS + kv_head) * HEAD_DIM + lane
            gl.store(k_pool_ptr + to, k_new, mask=lane < HEAD_DIM)
            gl.store(v_pool_ptr + to, v_new, mask=lane < HEAD_DIM)
        q = gl.convert_layout(q, LEFT)
        own_k = gl.convert_layout(k_new, gl.SliceLayout(1, RIGHT))
        own_v = gl.convert_layout(v_new, gl.SliceLayout(0, RIGHT))

        group = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, MMA))
        outs = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, MMA))
        mine = (kv_head * GROUP + group).to(gl.int64)
        out_mask = (group < GROUP)[:, None] & (outs < HEAD_DIM)[None, :]
        out_at = out_ptr + row.to(gl.int64) * out_stride
        top = gl.full([BLOCK_G], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
        total = gl.zeros([BLOCK_G], gl.float32, layout=gl.SliceLayout(1, MMA))
        mixed = gl.zeros([BLOCK_G, BLOCK_D], gl.float32, layout=MMA)
        for start in range(begin, end, BLOCK_T):
            place_in_ring = (start - begin) // BLOCK_T % STAGES
            async_copy.wait_group(STAGES - 1)
            k = k_ring.index(place_in_ring).permute((1, 0)).load(RIGHT)
            key = start + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, RIGHT))
            k = gl.where((key == position)[None, :], own_k[:, None], k)
            held = start + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, MMA)) < end
            top = gl.where(start % PIECE_T == 0, float("-inf"), top)
            scores = mma_v2(q, k, gl.zeros([BLOCK_G, BLOCK_T], gl.float32, layout=MMA), input_precision="ieee")
            scores = gl.where(held[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=1) * scale)
            zeros = gl.zeros([BLOCK_G, BLOCK_T], gl.float32, layout=MMA)
            weights = gl.exp2(gl.fma(scores, zeros + scale, -new_top[:, None] + zeros))
            fade = gl.exp2(top - new_top)
            total = gl.fma(total, fade, gl.sum(weights, axis=1))
            left = gl.convert_layout(weights.to(DTYPE), LEFT)
            v = v_ring.index(place_in_ring).load(RIGHT)
            key_of_v = start + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, RIGHT))
            v = gl.where((key_of_v == position)[:, None], own_v[None, :], v)
            mixed = mma_v2(left, v, mixed * fade[:, None], input_precision="ieee")
            top = new_top
            if start + STAGES * BLOCK_T < end:
                _ask_tile(
                    k_ring.index(place_in_ring), v_ring.index(place_in_ring), k_pool_ptr, v_pool_ptr, table_at,
                    start + STAGES * BLOCK_T, end, place, slots_per_page, kv_head,
                    KV_HEADS, HEAD_DIM, PAGE_TOKENS, COPY,
                )  # fmt: skip
            async_copy.commit_group()
            if (start + BLOCK_T) % PIECE_T == 0 or start + BLOCK_T >= end:
                if length <= PIECE_T:
                    out_to = out_at + mine[:, None] * HEAD_DIM + outs[None, :]
                    gl.store(out_to, (mixed / total[:, None]).to(DTYPE), mask=out_mask)
                else:
                    part = (first_place + (start - begin) // PIECE_T).to(gl.int64) * HEADS + mine
                    gl.store(sums_ptr + part[:, None] * HEAD_DIM + outs[None, :], mixed, mask=out_mask)
                    gl.store(stats_ptr + 2 * part, top, mask=group < GROUP)
                    gl.store(stats_ptr + 2 * part + 1, total, mask=group < GROUP)
        async_copy.wait_group(0)
        if length > PIECE_T:
            thread_barrier()  # all of this program's stores come before its ticket
            ticket_at = tickets_ptr + row * KV_HEADS + kv_head
            is_last = runs == 1
            if runs > 1:
                is_last = gl.atomic_add(ticket_at, 1, sem="acq_rel") == runs - 1
            if is_last:
                if runs > 1:
                    gl.store(ticket_at, 0)
                pieces = (length + PIECE_T - 1) // PIECE_T
                first = first_place - begin // PIECE_T
                for one in range(GROUP):
                    of = kv_head * GROUP + one
                    _combine(
                        sums_ptr, stats_ptr, out_at + of * HEAD_DIM, first, pieces, of,
                        HEADS, HEAD_DIM, BLOCK_D, WARPS, DTYPE,
                    )  # fmt: skip
    gdc_wait()  # also where there is no job: whoever waits for this launch waits for those before it
