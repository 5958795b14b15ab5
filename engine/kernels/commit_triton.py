# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The fill of deeper planes for tokens that leave early, from a device list of them.

Owns the copy of a leaver's last executed plane to the planes that later tokens of its request will read, in every
recurrent layer: the twin of `KvPool.fill_deeper`. Programs beyond the device count return at once, so that the launch
may sit in a graph whoever leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.exit_triton import Leavers
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_common import cell_of, next_power

BLOCK = 2048


@triton.jit(
    do_not_specialize=["first_layer", "slots_per_page", "table_stride", "planes"],
    do_not_specialize_on_alignment=["leaver_ptr", "count_ptr", "done_ptr", "slots_ptr", "positions_ptr"],
)
def fill_kernel(
    k_pool_ptr, v_pool_ptr, leaver_ptr, count_ptr, done_ptr, max_loops_ptr, starts_ptr,
    slots_ptr, positions_ptr, page_table_ptr, table_stride, slots_per_page, first_layer, planes,
    CELL: tl.constexpr, BLOCK_C: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (most leavers, recurrent layers). starts [planes] int64: start(plane) - first(plane)."""
    if tl.program_id(0) >= tl.load(count_ptr):
        return
    row = tl.load(leaver_ptr + tl.program_id(0))
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    done = tl.load(done_ptr + row)
    until = tl.minimum(tl.load(max_loops_ptr + slot.to(tl.int64)), planes).to(tl.int32)
    if done >= until:
        return
    layer = first_layer + tl.program_id(1)
    start = tl.load(starts_ptr + done - 1)
    source = cell_of(page_table_ptr, table_stride, slot, position, start, layer, slots_per_page, slot >= 0, PAGE_TOKENS)
    for begin in tl.static_range(0, CELL, BLOCK_C):
        lane = begin + tl.arange(0, BLOCK_C)
        mask = lane < CELL
        k = tl.load(k_pool_ptr + source * CELL + lane, mask=mask, other=0.0)
        v = tl.load(v_pool_ptr + source * CELL + lane, mask=mask, other=0.0)
        for plane in range(done, until):
            start = tl.load(starts_ptr + plane)
            target = cell_of(
                page_table_ptr, table_stride, slot, position, start, layer, slots_per_page, slot >= 0, PAGE_TOKENS
            )
            tl.store(k_pool_ptr + target * CELL + lane, k, mask=mask)
            tl.store(v_pool_ptr + target * CELL + lane, v, mask=mask)


def fill_deeper(
    leavers: Leavers,
    rows: RowAddresses,
    max_loops: Tensor,
    starts: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    first_layer: int,
    layers: int,
) -> None:
    """Fill planes done .. min(planes, max_loops) - 1 of every leaver in `layers` layers from `first_layer` on.

    max_loops [slots] int64 and starts [planes] int64 (start(plane) - first(plane)) are on the device; the planes of
    `rows` themselves aren't read. Pools are [slots, page_tokens, kv_heads, d].
    """
    _, page_tokens, kv_heads, width = k_pool.shape
    cell = kv_heads * width
    fill_kernel[(leavers.rows.shape[0], layers)](
        k_pool,
        v_pool,
        leavers.rows,
        leavers.count,
        leavers.done,
        max_loops,
        starts,
        rows.slots,
        rows.positions,
        rows.page_table,
        rows.page_table.stride(0),
        rows.slots_per_page,
        first_layer,
        starts.shape[0],
        CELL=cell,
        BLOCK_C=min(BLOCK, next_power(cell)),
        PAGE_TOKENS=page_tokens,
        enable_fp_fusion=True,
        num_warps=4,
    )


def plain_fill_deeper(
    leavers: Leavers,
    rows: RowAddresses,
    max_loops: Tensor,
    starts: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    first_layer: int,
    layers: int,
) -> None:
    """The torch twin of `fill_deeper`."""
    page_tokens = k_pool.shape[1]
    for row in leavers.rows[: int(leavers.count)].tolist():
        done, slot = int(leavers.done[row]), int(rows.slots[row])
        position = int(rows.positions[row])
        page = int(rows.page_table[slot, position // page_tokens])
        for plane in range(done, min(len(starts), int(max_loops[slot]))):
            for layer in range(first_layer, first_layer + layers):
                target, source = (page * rows.slots_per_page + int(starts[at]) + layer for at in (plane, done - 1))
                for pool in (k_pool, v_pool):
                    pool[target, position % page_tokens] = pool[source, position % page_tokens]
