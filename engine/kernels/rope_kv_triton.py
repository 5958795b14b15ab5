# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rotation of q and k and the write of k and v into the paged pool, for any rows of a traversal.

Owns the kernel between the QKV product and attention. It reads the fused product as it lies there, rotates by tables
indexed with the row's position, and writes slot-exact cells with 64-bit addresses. A row whose slot is negative is
padding: nothing is read or written for it. It must not know models; conventions come as flags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.triton_common import (
    TL_DTYPES,
    cell_of,
    launch_options,
    next_power,
    partner_lane,
    rotated,
    rounded,
)


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """Where rows live. [N] int32: slot (negative for padding), position, and start(plane) - first(plane).

    `page_table` [slots, pages of a request] int32; `slots_per_page` is the layout's S.
    """

    slots: Tensor
    positions: Tensor
    plane_slots: Tensor
    page_table: Tensor
    slots_per_page: int

    def cells(self, layer: int, page_tokens: int) -> Tensor:
        """[N] int64, of live rows; for the twins."""
        positions = self.positions.long()
        pages = self.page_table[self.slots.long(), positions // page_tokens].long()
        return (pages * self.slots_per_page + self.plane_slots + layer) * page_tokens + positions % page_tokens


@dataclass(frozen=True, slots=True)
class Turning:
    """A rotation: tables [context, d] of model dtype (split-half) or [context, d / 2] float32 (`pairs`).

    `bias` [2, heads * d], where a model has it, is added to q and k before they turn (rounded there).
    """

    cos: Tensor
    sin: Tensor
    pairs: bool
    bias: Tensor | None = None


@triton.jit
def load_pair(
    x_ptr, bias_ptr, lane, mask,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Lanes of heads and those that they turn with, float32, biased."""
    other = partner_lane(lane, HEAD_DIM, PAIRS)
    x = tl.load(x_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + other, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = rounded(x + tl.load(bias_ptr + lane, mask=mask, other=0.0).to(tl.float32), DTYPE)
        partner = rounded(partner + tl.load(bias_ptr + other, mask=mask, other=0.0).to(tl.float32), DTYPE)
    return x, partner


@triton.jit
def load_turn(cos_ptr, sin_ptr, lane, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Those lanes' angles in the table row at cos_ptr, sin_ptr; float32."""
    entry = lane // 2 if PAIRS else lane
    cos = tl.load(cos_ptr + entry, mask=lane < HEAD_DIM, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + entry, mask=lane < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def load_rotated(
    x_ptr, bias_ptr, cos_ptr, sin_ptr, lane, mask,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads at x_ptr (scalar or block of pointers to lane 0) rotated by the table row at cos_ptr, sin_ptr."""
    x, partner = load_pair(x_ptr, bias_ptr, lane, mask, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
    cos, sin = load_turn(cos_ptr, sin_ptr, lane, HEAD_DIM, PAIRS)
    return rotated(x, partner, cos, sin, lane, HEAD_DIM, PAIRS, DTYPE)


@triton.jit(
    do_not_specialize=["layer", "slots_per_page", "table_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "plane_slots_ptr"],
)
def rope_kv_kernel(
    qkv_ptr, q_out_ptr, k_pool_ptr, v_pool_ptr, bias_ptr, cos_ptr, sin_ptr,
    slots_ptr, positions_ptr, plane_slots_ptr, page_table_ptr,
    qkv_stride, q_out_stride, table_stride, turn_stride, slots_per_page, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of BLOCK_H heads). qkv [N, (HEADS + 2 KV_HEADS) * HEAD_DIM]."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    if EARLY:
        gdc_wait()
    if slot < 0:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    cos_at = cos_ptr + position.to(tl.int64) * turn_stride
    sin_at = sin_ptr + position.to(tl.int64) * turn_stride
    at = qkv_ptr + row * qkv_stride + head * HEAD_DIM
    mask = (head < HEADS) & (lane < HEAD_DIM)
    q = load_rotated(at, bias_ptr + head * HEAD_DIM, cos_at, sin_at, lane, mask, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
    tl.store(q_out_ptr + row * q_out_stride + head * HEAD_DIM + lane, q, mask=mask)
    if tl.program_id(1) * BLOCK_H < KV_HEADS:
        mask = (head < KV_HEADS) & (lane < HEAD_DIM)
        k_bias = bias_ptr + (HEADS + head) * HEAD_DIM
        k_at = at + HEADS * HEAD_DIM
        k = load_rotated(k_at, k_bias, cos_at, sin_at, lane, mask, HEAD_DIM, PAIRS, HAS_BIAS, DTYPE)
        v = tl.load(at + (HEADS + KV_HEADS) * HEAD_DIM + lane, mask=mask, other=0.0)
        plane_slot = tl.load(plane_slots_ptr + row)
        cell = cell_of(
            page_table_ptr, table_stride, slot, position, plane_slot, layer, slots_per_page, slot >= 0, PAGE_TOKENS
        )
        to = cell * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + lane
        tl.store(k_pool_ptr + to, k, mask=mask)
        tl.store(v_pool_ptr + to, v, mask=mask)


def rope_kv(
    qkv: Tensor,
    heads: int,
    turning: Turning,
    rows: RowAddresses,
    k_pool: Tensor,
    v_pool: Tensor,
    layer: int,
    out: Tensor | None = None,
    *,
    early: bool = False,
) -> Tensor:
    """qkv [N, (heads + 2 kv_heads) * d]: writes k and v of live rows at (position, plane, layer), returns rotated q.

    Pools are [slots, page_tokens, kv_heads, d]. q comes as [N, heads * d]; rows of padding in it are unwritten.
    `early`: the launch may start before the one before it has ended, which didn't make `rows` (see
    `triton_common.starts_early`).
    """
    _, page_tokens, kv_heads, width = k_pool.shape
    out = torch.empty(qkv.shape[0], heads * width, dtype=qkv.dtype, device=qkv.device) if out is None else out
    block_h = min(8, next_power(heads))
    rope_kv_kernel[(qkv.shape[0], triton.cdiv(heads, block_h))](
        qkv,
        out,
        k_pool,
        v_pool,
        qkv if turning.bias is None else turning.bias,
        turning.cos,
        turning.sin,
        rows.slots,
        rows.positions,
        rows.plane_slots,
        rows.page_table,
        qkv.stride(0),
        out.stride(0),
        rows.page_table.stride(0),
        turning.cos.stride(0),
        rows.slots_per_page,
        layer,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=width,
        BLOCK_D=next_power(width),
        BLOCK_H=block_h,
        PAGE_TOKENS=page_tokens,
        PAIRS=turning.pairs,
        HAS_BIAS=turning.bias is not None,
        EARLY=early,
        DTYPE=TL_DTYPES[qkv.dtype],
        enable_fp_fusion=True,
        num_warps=4,
        **launch_options(early),
    )
    return out


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_stride, turn_stride, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of heads): rotation alone, by cos and sin of the row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (lane < HEAD_DIM)
    at = x_ptr + row * x_stride + head * HEAD_DIM
    turned = load_rotated(
        at, at, cos_ptr + row * turn_stride, sin_ptr + row * turn_stride, lane, mask, HEAD_DIM, PAIRS, False, DTYPE
    )
    tl.store(out_ptr + (row * heads + head) * HEAD_DIM + lane, turned, mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
    """x [N, heads, d] (rows may be strided) by cos, sin [N, d] of x's dtype, or [N, d / 2] float32 for `pairs`."""
    rows, heads, width = x.shape
    assert x.stride(2) == 1 and x.stride(1) == width, x.stride()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rope_kernel[(rows, triton.cdiv(heads, 8))](
        x, cos, sin, out, x.stride(0), cos.stride(0), heads,
        HEAD_DIM=width, BLOCK_D=next_power(width), BLOCK_H=8, PAIRS=pairs, DTYPE=TL_DTYPES[x.dtype],
        enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return out


def plain_rope_kv(
    qkv: Tensor, heads: int, turning: Turning, rows: RowAddresses, k_pool: Tensor, v_pool: Tensor, layer: int
) -> Tensor:
    """The torch twin of `rope_kv`; q of padding rows is zero."""
    _, page_tokens, kv_heads, width = k_pool.shape
    live = (rows.slots >= 0).nonzero().squeeze(1)
    split = qkv[live].view(len(live), -1, width)
    qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if turning.bias is not None:
        qk = qk + turning.bias.view(-1, width)
    at = rows.positions[live].long()
    turn = PlainOps().rope_pairs if turning.pairs else PlainOps().rope_half
    qk = turn(qk, turning.cos[at], turning.sin[at])
    picked = RowAddresses(
        rows.slots[live], rows.positions[live], rows.plane_slots[live], rows.page_table, rows.slots_per_page
    )
    cells = picked.cells(layer, page_tokens)
    k_pool.view(-1, kv_heads, width)[cells] = qk[:, heads:]
    v_pool.view(-1, kv_heads, width)[cells] = v
    q = torch.zeros(qkv.shape[0], heads * width, dtype=qkv.dtype, device=qkv.device)
    q[live] = qk[:, :heads].flatten(1)
    return q
