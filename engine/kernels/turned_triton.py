# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What a QKV product of many rows ends with: rotation of q and k, and the write of k and v into the paged pool.

Owns the epilogue of `wide_triton` that does both, and the columns it reads: what a traversal's layers share is looked
up once for all of them, a row's angles and its cell. Roundings are those of `rope_kv_triton`, its twin. A tile holds
whole heads: both lanes of a rotation lie in one thread. It must not know which model's heads they are.

Angles come by the tensor copy engine into the shared memory that the turned rows are stored from: every thread reads
angles where it then writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from epicycle.engine.kernels.gluon_common import halves, load_tile, put_boxes
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning
from epicycle.engine.kernels.triton_common import cell_of

BLOCK_ROWS = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Of rows [N]: cos and sin of their positions [2, N, d], and their cells [N] int64 of layer 0, -1 for padding,
    whose angles are nothing."""

    angles: Tensor
    cells: Tensor


@dataclass(frozen=True, slots=True)
class TurnedRows:
    """Where a product's rows go: q [N, heads * d], and k and v of `layer` to their places in pools
    [slots, page_tokens, kv_heads, d]."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    places: Places
    layer: int


@triton.jit(do_not_specialize=["rows", "slots_per_page", "table_stride"])
def places_kernel(
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr, cos_ptr, sin_ptr, angles_ptr, cells_ptr,
    rows, table_stride, turn_stride, slots_per_page,
    HEAD_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows). HEAD_DIM a power of two."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    is_live = slot >= 0
    position = tl.load(positions_ptr + row, mask=is_live, other=0)
    plane_slot = tl.load(plane_slots_ptr + row, mask=is_live, other=0)
    cell = cell_of(page_table_ptr, table_stride, slot, position, plane_slot, 0, slots_per_page, is_live, PAGE_TOKENS)
    tl.store(cells_ptr + row, tl.where(is_live, cell, -1), mask=row < rows)
    lane = tl.arange(0, HEAD_DIM)[None, :]
    at = position.to(tl.int64)[:, None] * turn_stride + lane
    to = row.to(tl.int64)[:, None] * HEAD_DIM + lane
    tl.store(angles_ptr + to, tl.load(cos_ptr + at, mask=is_live[:, None]), mask=is_live[:, None])
    sines = angles_ptr + rows.to(tl.int64) * HEAD_DIM
    tl.store(sines + to, tl.load(sin_ptr + at, mask=is_live[:, None]), mask=is_live[:, None])


def find_places(rows: RowAddresses, turning: Turning, page_tokens: int) -> Places:
    """Of rows [N], for every layer of a traversal that turns by `turning`."""
    count, width = len(rows.slots), turning.cos.shape[1]
    angles = torch.empty(2, count, width, dtype=turning.cos.dtype, device=turning.cos.device)
    cells = torch.empty(count, dtype=torch.int64, device=angles.device)
    places_kernel[(triton.cdiv(count, BLOCK_ROWS),)](
        rows.slots, rows.positions, rows.plane_slots, rows.page_table, turning.cos, turning.sin, angles, cells,
        count, rows.page_table.stride(0), turning.cos.stride(0), rows.slots_per_page,
        HEAD_DIM=width, PAGE_TOKENS=page_tokens, BLOCK=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip
    return Places(angles, cells)


def plain_turned(qkv: Tensor, to: TurnedRows) -> None:
    """The torch twin of what a QKV product [N, (heads + 2 kv_heads) * d] ends with; q of padding is left alone."""
    _, page_tokens, kv_heads, width = to.k_pool.shape
    heads, live = to.q.shape[1] // width, to.places.cells >= 0
    split = qkv[live].view(-1, heads + 2 * kv_heads, width)
    angles = to.places.angles[:, live]
    turned = PlainOps().rope_half(split[:, : heads + kv_heads], angles[0], angles[1])
    cells = to.places.cells[live] + to.layer * page_tokens
    to.q[live] = turned[:, :heads].flatten(1)
    to.k_pool.view(-1, kv_heads, width)[cells] = turned[:, heads:]
    to.v_pool.view(-1, kv_heads, width)[cells] = split[:, heads + kv_heads :]


@gluon.jit
def load_angles(angles_desc, aside, ready, m, M):
    """cos and sin of a tile's rows, for each group its own."""
    mbarrier.expect(ready, 4 * angles_desc.block_type.nbytes)
    ROWS: gl.constexpr = angles_desc.block_type.shape[0]
    for which in gl.static_range(2):
        area = aside.index(which)
        for sine in gl.static_range(2):
            load_tile(angles_desc, [sine * M + m + which * ROWS, 0], ready, area.slice(sine * ROWS, ROWS))


@gluon.jit
def _turned(x, cos, sin, DTYPE: gl.constexpr):
    """A head's float32 sums [ROWS, d] by cos and sin [ROWS, d]: `triton_common.rotated` of both lanes."""
    left, right = halves(x.to(DTYPE))
    left, right = left.to(gl.float32), right.to(gl.float32)
    left_cos, right_cos = halves(cos)
    left_sin, right_sin = halves(sin)
    minus = (right * left_sin.to(gl.float32)).to(DTYPE).to(gl.float32)
    plus = (left * right_sin.to(gl.float32)).to(DTYPE).to(gl.float32)
    turned_left = (left * left_cos.to(gl.float32)).to(DTYPE).to(gl.float32) - minus
    turned_right = (right * right_cos.to(gl.float32)).to(DTYPE).to(gl.float32) + plus
    y = gl.join(turned_left.to(DTYPE), turned_right.to(DTYPE)).permute(0, 2, 1).reshape(x.shape)
    return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def _put_turned(out, acc, ROWS: gl.constexpr, DTYPE: gl.constexpr):
    """One head to `out`, or two one after the other: where cos and sin lie, one after the other."""
    WIDTH: gl.constexpr = out.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    cos, sin = out.slice(0, ROWS).load(LAYOUT), out.slice(ROWS, ROWS).load(LAYOUT)
    if acc.shape[1] == WIDTH:
        out.slice(0, ROWS).store(_turned(acc, cos, sin, DTYPE))
    else:
        left, right = halves(acc)
        first, second = _turned(left, cos, sin, DTYPE), _turned(right, cos, sin, DTYPE)
        out.slice(0, ROWS).store(first)
        out.slice(ROWS, ROWS).store(second)


@gluon.jit
def store_turned(to, out, turn, acc, m, n, M, DTYPE: gl.constexpr):
    """acc [ROWS, one or two heads], sums of rows from m and outputs from n."""
    q, k_pool, v_pool, cells, q_width, kv_width, shift = to
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = out.shape[1]
    # Sixteen bytes a thread, of whole rows.
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WHOLE))
    cell = gl.load(cells + row, mask=row < M, other=-1)
    ready, phase = turn
    mbarrier.wait(ready, phase)
    if n < q_width + kv_width:
        _put_turned(out, acc, ROWS, DTYPE)
    else:
        put_boxes(out, acc, DTYPE)
    fence_async_shared()  # the copy engine writes here next
    pool, place = q, row.to(gl.int64) * q_width + n
    if n >= q_width + kv_width:
        pool, place = v_pool, (cell + shift) * kv_width + (n - q_width - kv_width)
    elif n >= q_width:
        pool, place = k_pool, (cell + shift) * kv_width + (n - q_width)
    lane = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WHOLE))
    for head in gl.static_range(acc.shape[1] // WIDTH):
        values = out.slice(head * ROWS, ROWS).load(WHOLE)
        gl.store(pool + place[:, None] + (head * WIDTH + lane)[None, :], values, mask=(cell >= 0)[:, None])
