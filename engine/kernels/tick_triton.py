# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The small steps of a device tick, each one launch: which rows run, where they live, what they leave behind, who is
sampled, and what a token changes.

Owns kernels that do with slots' columns what the plain steps of `tick_backend`, `settle` and `read_out` do; those are
their twins. All columns are int64 unless said otherwise. Must not know models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import next_power

BLOCK_ROWS = 128
BLOCK_W = 1024


@triton.jit(do_not_specialize=["decode_rows", "prompt_rows", "sink"])
def route_kernel(
    decode_ptr, prompt_ptr, position_ptr, done_ptr, limit_ptr, decoding_ptr, seed_ptr, out_ptr, live_ptr,
    decode_rows, prompt_rows, sink, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows). prompt [5, P]: slot, position, depth, end, -. out [5, N]: slot, position, depth, noise
    seed, end; live [N] int8."""
    rows = decode_rows + prompt_rows
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    decodes = row < decode_rows
    slot = tl.load(decode_ptr + row, mask=decodes, other=0)
    position = tl.load(position_ptr + slot, mask=decodes, other=0)
    done = tl.load(done_ptr + slot, mask=decodes, other=0)
    goes_on = tl.load(decoding_ptr + slot, mask=decodes, other=0) != 0
    live = goes_on & ((done > 0) | (position < tl.load(limit_ptr + slot, mask=decodes, other=0)))
    prompts = is_row & (row >= decode_rows)
    at = prompt_ptr + (row - decode_rows)
    prompt_slot = tl.load(at, mask=prompts, other=0)
    slot = tl.where(decodes, slot, prompt_slot)
    end = tl.where(decodes, position + 1, tl.load(at + 3 * prompt_rows, mask=prompts, other=0))
    position = tl.where(decodes, position, tl.load(at + prompt_rows, mask=prompts, other=0))
    done = tl.where(decodes, done, tl.load(at + 2 * prompt_rows, mask=prompts, other=0))
    live = tl.where(decodes, live, prompt_slot != sink)
    seed = tl.load(seed_ptr + slot, mask=is_row, other=0)
    tl.store(out_ptr + row, slot, mask=is_row)
    tl.store(out_ptr + rows + row, position, mask=is_row)
    tl.store(out_ptr + 2 * rows + row, done, mask=is_row)
    tl.store(out_ptr + 3 * rows + row, seed, mask=is_row)
    tl.store(out_ptr + 4 * rows + row, end, mask=is_row)
    tl.store(live_ptr + row, live.to(tl.int8), mask=is_row)


def route(
    decode: Tensor,
    prompt: Tensor,
    position: Tensor,
    loops_done: Tensor,
    limit_tokens: Tensor,
    is_decoding: Tensor,
    noise_seed: Tensor,
    sink: int,
) -> tuple[Tensor, Tensor]:
    """Columns [5, N] (slot, position, depth, noise seed, end) and live [N] bool of `decode` [B] slots, then `prompt`
    [5, P] rows. Slots' columns are [slots]; a prompt row whose slot is `sink` isn't live."""
    decode_rows, prompt_rows = len(decode), prompt.shape[1]
    rows = decode_rows + prompt_rows
    out = torch.empty(5, rows, dtype=torch.int64, device=decode.device)
    live = torch.empty(rows, dtype=torch.bool, device=decode.device)
    route_kernel[(triton.cdiv(rows, BLOCK_ROWS),)](
        decode, prompt, position, loops_done, limit_tokens, is_decoding.view(torch.int8), noise_seed,
        out, live.view(torch.int8), decode_rows, prompt_rows, sink,
        BLOCK=BLOCK_ROWS, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out, live


@triton.jit(do_not_specialize=["rows", "decode_rows", "planes"])
def address_kernel(
    slots_ptr, positions_ptr, depths_ptr, live_ptr, starts_ptr, out_ptr, sizes_ptr, rows, decode_rows, planes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows). out [3, N] int32: slot or -1, position, start of the plane; sizes [B] int32."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    live = tl.load(live_ptr + row, mask=is_row, other=0) != 0
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    plane = tl.load(depths_ptr + row, mask=is_row, other=0) % planes
    start = tl.load(starts_ptr + plane, mask=is_row, other=0)
    tl.store(out_ptr + row, tl.where(live, slot, -1).to(tl.int32), mask=is_row)
    tl.store(out_ptr + rows + row, position.to(tl.int32), mask=is_row)
    tl.store(out_ptr + 2 * rows + row, start.to(tl.int32), mask=is_row)
    tl.store(sizes_ptr + row, tl.where(live, position + 1, 0).to(tl.int32), mask=row < decode_rows)


def addresses(
    slots: Tensor, positions: Tensor, depths: Tensor, live: Tensor, starts: Tensor, decode_rows: int
) -> tuple[Tensor, Tensor]:
    """([3, N] int32 slot (-1 where not live), position and starts[depth mod planes]; [B] int32 lengths, 0 where not
    live) of rows [N]; starts [planes]."""
    rows = len(slots)
    out = torch.empty(3, rows, dtype=torch.int32, device=slots.device)
    sizes = torch.empty(max(1, decode_rows), dtype=torch.int32, device=slots.device)
    address_kernel[(triton.cdiv(rows, BLOCK_ROWS),)](
        slots, positions, depths, live.view(torch.int8), starts, out, sizes, rows, decode_rows, len(starts),
        BLOCK=BLOCK_ROWS, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out, sizes[:decode_rows]


@triton.jit(do_not_specialize=["decode_rows"])
def settle_kernel(
    after_ptr, slots_ptr, depths_ptr, live_ptr, done_ptr, ran_ptr, left_ptr, state_ptr, results_ptr,
    states_ptr, state_rows_ptr, decode_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of the width). `done` [slots] are loops done after the exit test: 0 for a row that has left."""
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < WIDTH
    after = tl.load(after_ptr + row.to(tl.int64) * WIDTH + lane, mask=mask)
    if row < decode_rows:
        slot = tl.load(slots_ptr + row)
        live = tl.load(live_ptr + row) != 0
        if live:
            tl.store(state_ptr + slot * WIDTH + lane, after, mask=mask)
        if tl.program_id(1) == 0:
            ran = tl.where(live, tl.load(depths_ptr + row) + 1, 0)
            left = (live & (tl.load(done_ptr + slot) == 0)).to(tl.int64)
            tl.store(ran_ptr + slot, ran)
            tl.store(left_ptr + slot, left.to(tl.int8))
            tl.store(results_ptr + row, ran)
            tl.store(results_ptr + decode_rows + row, left)
    else:
        place = tl.load(state_rows_ptr + row - decode_rows)
        tl.store(states_ptr + place * WIDTH + lane, after, mask=mask)


def settle(
    after: Tensor,
    slots: Tensor,
    depths: Tensor,
    live: Tensor,
    loops_done: Tensor,
    ran: Tensor,
    left: Tensor,
    state: Tensor,
    results: Tensor,
    states: Tensor,
    state_rows: Tensor,
) -> None:
    """Store the rows' new states [N, W]: live decode rows into `state` [slots, W], prompt rows into `states` at
    `state_rows` [P]. Mark what each decode row did in `ran` and `left` [slots] bool, and in `results` [2 B]."""
    rows, width = after.shape
    assert after.is_contiguous()
    settle_kernel[(rows, triton.cdiv(width, BLOCK_W))](
        after, slots, depths, live.view(torch.int8), loops_done, ran, left.view(torch.int8), state, results,
        states, state_rows, rows - len(state_rows),
        WIDTH=width, BLOCK=BLOCK_W, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["decode_rows", "ends", "sink", "loops"])
def candidates_kernel(
    decode_ptr, left_ptr, ran_ptr, position_ptr, end_slots_ptr, end_positions_ptr,
    out_ptr, count_ptr, decode_rows, ends, sink, loops, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. out [4, M]: candidate number, slot (the sink where none is due), position, loops; due ones first."""
    place = tl.arange(0, BLOCK)
    rows = decode_rows + ends
    decodes = place < decode_rows
    is_end = (place < rows) & (place >= decode_rows)
    slot = tl.load(decode_ptr + place, mask=decodes, other=0)
    left = tl.load(left_ptr + slot, mask=decodes, other=0) != 0
    end_slot = tl.load(end_slots_ptr + place - decode_rows, mask=is_end, other=0)
    end_position = tl.load(end_positions_ptr + place - decode_rows, mask=is_end, other=0)
    position = tl.load(position_ptr + slot, mask=decodes, other=0)
    position = tl.where(decodes, position, end_position)
    depth = tl.where(decodes, tl.load(ran_ptr + slot, mask=decodes, other=0), loops)
    due = tl.where(decodes, left, is_end & (end_slot != sink))
    slot = tl.where(decodes, slot, end_slot)
    ones = due.to(tl.int32)
    total = tl.sum(ones, axis=0)
    before = tl.cumsum(ones, axis=0) - ones
    to = tl.where(due, before, total + place - before)
    mask = place < rows
    tl.store(out_ptr + to, place.to(tl.int64), mask=mask)
    tl.store(out_ptr + rows + to, tl.where(due, slot, sink).to(tl.int64), mask=mask)
    tl.store(out_ptr + 2 * rows + to, position, mask=mask)
    tl.store(out_ptr + 3 * rows + to, depth.to(tl.int64), mask=mask)
    tl.store(count_ptr, total)


def candidates(
    decode: Tensor,
    left: Tensor,
    ran: Tensor,
    position: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    sink: int,
    loops: int,
) -> tuple[Tensor, Tensor]:
    """([4, M] number, slot, position and loops of the candidates, those due a token first; count [1] int32).

    Candidates are the rows of `decode` [B], due where `left`, then prompts' `ends` (slots and positions [C]), due
    where the slot isn't the sink.
    """
    end_slots, end_positions = ends if ends is not None else (decode[:0], decode[:0])
    rows = len(decode) + len(end_slots)
    out = torch.empty(4, rows, dtype=torch.int64, device=decode.device)
    count = torch.empty(1, dtype=torch.int32, device=decode.device)
    candidates_kernel[(1,)](
        decode, left.view(torch.int8), ran, position, end_slots, end_positions,
        out, count, len(decode), len(end_slots), sink, loops,
        BLOCK=max(32, next_power(rows)), enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out, count


@triton.jit(do_not_specialize=["rows", "sink"])
def starters_kernel(
    slots_ptr, positions_ptr, depths_ptr, seeds_ptr, live_ptr, tokens_ptr, out_ptr, count_ptr, rows, sink,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. out [6, N]: row, slot (the sink where no token starts), position, depth, seed, token; starters
    first."""
    row = tl.arange(0, BLOCK)
    mask = row < rows
    depth = tl.load(depths_ptr + row, mask=mask, other=1)
    starts = (tl.load(live_ptr + row, mask=mask, other=0) != 0) & (depth == 0)
    ones = starts.to(tl.int32)
    total = tl.sum(ones, axis=0)
    before = tl.cumsum(ones, axis=0) - ones
    to = out_ptr + tl.where(starts, before, total + row - before)
    slot = tl.load(slots_ptr + row, mask=mask, other=0)
    tl.store(to, row.to(tl.int64), mask=mask)
    tl.store(to + rows, tl.where(starts, slot, sink).to(tl.int64), mask=mask)
    tl.store(to + 2 * rows, tl.load(positions_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(to + 3 * rows, depth, mask=mask)
    tl.store(to + 4 * rows, tl.load(seeds_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(to + 5 * rows, tl.load(tokens_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(count_ptr, total)


def starters(
    slots: Tensor, positions: Tensor, depths: Tensor, seeds: Tensor, live: Tensor, tokens: Tensor, sink: int
) -> tuple[Tensor, Tensor]:
    """([6, N] row, slot, position, depth, seed and token of rows [N], those first that are live at depth 0, the others
    at the sink; their count [1] int32)."""
    rows = len(slots)
    out = torch.empty(6, rows, dtype=torch.int64, device=slots.device)
    count = torch.empty(1, dtype=torch.int32, device=slots.device)
    starters_kernel[(1,)](
        slots, positions, depths, seeds, live.view(torch.int8), tokens, out, count, rows, sink,
        BLOCK=max(32, next_power(rows)), enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out, count


@triton.jit
def put_kernel(x_ptr, rows_ptr, count_ptr, to_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N, blocks of the width)."""
    place = tl.program_id(0)
    if place >= tl.load(count_ptr):
        return
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < WIDTH
    x = tl.load(x_ptr + place.to(tl.int64) * WIDTH + lane, mask=mask)
    tl.store(to_ptr + tl.load(rows_ptr + place) * WIDTH + lane, x, mask=mask)


def put_rows(x: Tensor, rows: Tensor, count: Tensor, to: Tensor) -> None:
    """The first `count` [1] rows of x [N, W] into `rows` [N] of `to` [N, W]."""
    assert x.is_contiguous() and to.is_contiguous()
    width = x.shape[1]
    put_kernel[(len(x), triton.cdiv(width, BLOCK_W))](
        x, rows, count, to, WIDTH=width, BLOCK=BLOCK_W, enable_fp_fusion=True, num_warps=4
    )


@triton.jit(do_not_specialize=["decode_rows"])
def gather_kernel(
    number_ptr, slots_ptr, count_ptr, state_ptr, states_ptr, end_states_ptr, out_ptr, decode_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (M, blocks of the width): the states of the first `count` candidates."""
    place = tl.program_id(0)
    if place >= tl.load(count_ptr):
        return
    number = tl.load(number_ptr + place)
    at = state_ptr + tl.load(slots_ptr + place) * WIDTH
    if number >= decode_rows:
        at = states_ptr + tl.load(end_states_ptr + number - decode_rows) * WIDTH
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < WIDTH
    tl.store(out_ptr + place.to(tl.int64) * WIDTH + lane, tl.load(at + lane, mask=mask), mask=mask)


def gather_states(found: Tensor, count: Tensor, state: Tensor, states: Tensor, end_states: Tensor, ends: int) -> Tensor:
    """[M, W] states of candidates `found` [4, M], `ends` of them prompts' ends; rows from `count` on are unwritten."""
    rows, width = found.shape[1], state.shape[1]
    out = torch.empty(rows, width, dtype=state.dtype, device=state.device)
    gather_kernel[(rows, triton.cdiv(width, BLOCK_W))](
        found[0], found[1], count, state, states, end_states, out, rows - ends,
        WIDTH=width, BLOCK=BLOCK_W, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def feed_back_kernel(
    found_ptr, count_ptr, tokens_ptr, finite_ptr, stop_ids_ptr, token_ptr, position_ptr, outputs_ptr, most_ptr,
    decoding_ptr, results_ptr, rows, STOPS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (M). results: the count, then [5, M] number, token, loops, is finite, is stop."""
    place = tl.program_id(0)
    count = tl.load(count_ptr)
    if place == 0:
        tl.store(results_ptr, count.to(tl.int64))
    if place >= count:
        return
    slot = tl.load(found_ptr + rows + place)
    token = tl.load(tokens_ptr + place)
    finite = tl.load(finite_ptr + place) != 0
    lane = tl.arange(0, BLOCK_S)
    ids = tl.load(stop_ids_ptr + slot * STOPS + lane, mask=lane < STOPS, other=-1)
    stop = tl.sum((ids == token).to(tl.int32), axis=0) > 0
    outputs = tl.load(outputs_ptr + slot) + 1
    goes_on = finite & (stop == 0) & (outputs < tl.load(most_ptr + slot))
    tl.store(token_ptr + slot, token)
    tl.store(position_ptr + slot, tl.load(found_ptr + 2 * rows + place) + 1)
    tl.store(outputs_ptr + slot, outputs)
    tl.store(decoding_ptr + slot, goes_on.to(tl.int8))
    at = results_ptr + 1 + place
    tl.store(at, tl.load(found_ptr + place))
    tl.store(at + rows, token)
    tl.store(at + 2 * rows, tl.load(found_ptr + 3 * rows + place))
    tl.store(at + 3 * rows, finite.to(tl.int64))
    tl.store(at + 4 * rows, stop.to(tl.int64))


def feed_back(
    found: Tensor,
    count: Tensor,
    tokens: Tensor,
    is_finite: Tensor,
    stop_ids: Tensor,
    token: Tensor,
    position: Tensor,
    outputs: Tensor,
    max_tokens: Tensor,
    is_decoding: Tensor,
    results: Tensor,
) -> None:
    """Give the first `count` candidates of `found` [4, M] their tokens [M]; is_finite [M] int8. Columns are [slots]."""
    rows, stops = found.shape[1], stop_ids.shape[1]
    feed_back_kernel[(rows,)](
        found, count, tokens, is_finite, stop_ids, token, position, outputs, max_tokens,
        is_decoding.view(torch.int8), results, rows,
        STOPS=stops, BLOCK_S=max(32, next_power(stops)), enable_fp_fusion=True, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "slots_per_page", "table_stride"])
def write_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr,
    k_stride, v_stride, table_stride, slots_per_page, layer,
    CELL: tl.constexpr, BLOCK: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of a cell)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    position = tl.load(positions_ptr + row)
    page = tl.load(page_table_ptr + slot.to(tl.int64) * table_stride + position // PAGE_TOKENS).to(tl.int64)
    cell = (page * slots_per_page + tl.load(plane_slots_ptr + row) + layer) * PAGE_TOKENS + position % PAGE_TOKENS
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < CELL
    tl.store(k_pool_ptr + cell * CELL + lane, tl.load(k_ptr + row * k_stride + lane, mask=mask), mask=mask)
    tl.store(v_pool_ptr + cell * CELL + lane, tl.load(v_ptr + row * v_stride + lane, mask=mask), mask=mask)


def write_kv(
    k: Tensor,
    v: Tensor,
    columns: Tensor,
    page_table: Tensor,
    slots_per_page: int,
    k_pool: Tensor,
    v_pool: Tensor,
    layer: int,
) -> None:
    """k, v [N, kv_heads, d] (rows may be strided) into the cells of `columns` [3, N] (see `addresses`)."""
    _, page_tokens, kv_heads, width = k_pool.shape
    cell = kv_heads * width
    assert k.stride(2) == v.stride(2) == 1, (k.stride(), v.stride())
    assert k.stride(1) == v.stride(1) == width, (k.stride(), v.stride())
    write_kernel[(len(k), triton.cdiv(cell, BLOCK_W))](
        k, v, k_pool, v_pool, columns[0], columns[1], columns[2], page_table,
        k.stride(0), v.stride(0), page_table.stride(0), slots_per_page, layer,
        CELL=cell, BLOCK=BLOCK_W, PAGE_TOKENS=page_tokens, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
