# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of many rows in tiles wider than Triton's own pipeline can hold, on cards with warp-group products (Hopper).

Owns one persistent Gluon kernel of three roles: a warp that copies tiles of x and W into a ring, and two groups of four
warps that multiply, each half of a tile's rows. They wait for one another at the ring's slots only, so one group's
epilogue runs beside the other's products. The order of the K sum is that of `gemm_triton`: ascending steps into one
float32 accumulator, or one for each chunk, added in order and rounded once. It must not know which product it computes.

A group's accumulator of 64 x 256 takes half of its registers. What was summed of the chunks before stands beside it,
its left half in registers and its right half in shared memory. Gate and up are the two halves of one accumulator.
Tiles that would leave more than half of the card idle in the last round are cut in two.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epicycle.engine.kernels.gluon_common import HAS_REINTERPRET, halves, load_tile, put_boxes, silu_mul, store_tile
from epicycle.engine.kernels.products import GemmConfig, chunk_length
from epicycle.engine.kernels.triton_common import TL_DTYPES, empty_product, multiplies_in_groups, multiprocessors
from epicycle.engine.kernels.turned_triton import TurnedRows, load_angles, store_turned

EPILOGUES = {"plain": 0, "pair": 2, "parts": 3, "turned": 4}
PLAIN, PAIR, PARTS, TURNED = (gl.constexpr(EPILOGUES[name]) for name in ("plain", "pair", "parts", "turned"))
MULTIPLYING_REGISTERS, COPYING_REGISTERS = gl.constexpr(232), gl.constexpr(40)  # of a thread; 504 for all three roles


@gluon.jit
def _place(unit, M, N, BLOCK_M: gl.constexpr, OUTS: gl.constexpr, SPLIT: gl.constexpr, GROUP_M: gl.constexpr):
    """First row, first output and part of a unit of work: neighbours share weights and inputs in L2."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tile = unit // SPLIT
    width = GROUP_M * gl.cdiv(N, OUTS)
    first = (tile // width) * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    return (first + tile % height) * BLOCK_M, (tile % width) // height * OUTS, unit % SPLIT


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _before(slot, SLOTS: gl.constexpr):
    return gl.where(slot == 0, SLOTS - 1, slot - 1)


@gluon.jit
def _copy_unit(
    x_desc, w_desc, ring, slot, phase, m, n, begin, steps, up_offset,
    WIDTH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """x [BLOCK_M, K range] and WIDTH rows of W, gate rows before up rows, in boxes of w_desc's height."""
    x_ring, w_ring, ready, free = ring
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BYTES: gl.constexpr = (BLOCK_M + WIDTH) * BLOCK_K * (x_ring.dtype.primitive_bitwidth // 8)
    BOXES: gl.constexpr = WIDTH // BOX
    GATES: gl.constexpr = BOXES // 2 if EPILOGUE == PAIR else BOXES
    for step in range(begin, begin + steps):
        bar = ready.index(slot)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(bar, BYTES)
        load_tile(x_desc, [m, step * BLOCK_K], bar, x_ring.index(slot))
        for box in gl.static_range(BOXES):
            at = n + box * BOX if box < GATES else up_offset + n + (box - GATES) * BOX
            load_tile(w_desc, [at, step * BLOCK_K], bar, w_ring.index(slot).slice(box * BOX, BOX))
        slot, phase = _next(slot, phase, x_ring.shape[0])
    return slot, phase


@gluon.jit
def _copy(
    x_desc, w_desc, angles, ring, aside, work,
    OUTS: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr, EPILOGUE: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    M, N, chunk_steps, whole, cut = work
    angles_desc, angles_ready = angles
    steps = chunk_steps * (CHUNKS // SPLIT)
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    slot = 0
    phase = 1  # the first round finds every slot free
    for unit in range(gl.program_id(0), whole, gl.num_programs(0)):
        m, n, part = _place(unit, M, N, BLOCK_M, OUTS, SPLIT, GROUP_M)
        slot, phase = _copy_unit(x_desc, w_desc, ring, slot, phase, m, n, part * steps, steps, N, BLOCK_N, EPILOGUE)
        if EPILOGUE == TURNED:
            load_angles(angles_desc, aside, angles_ready, m, M)
    if EPILOGUE != TURNED or aside.shape[2] < OUTS:  # a head is never cut
        for half in range(gl.program_id(0), cut, gl.num_programs(0)):
            m, n, part = _place(whole + half // 2, M, N, BLOCK_M, OUTS, SPLIT, GROUP_M)
            n += half % 2 * (OUTS // 2)
            slot, phase = _copy_unit(
                x_desc, w_desc, ring, slot, phase, m, n, part * steps, steps, N, BLOCK_N // 2, EPILOGUE
            )
            if EPILOGUE == TURNED:
                load_angles(angles_desc, aside, angles_ready, m, M)


@gluon.jit
def _sum_steps(ring, slot, phase, steps, FIRST: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """float32 [ROWS, WIDTH] over the next `steps` slots of the ring, of x rows from FIRST."""
    x_ring, w_ring, ready, free = ring
    SLOTS: gl.constexpr = x_ring.shape[0]
    acc = gl.zeros([ROWS, WIDTH], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    for step in range(steps):
        mbarrier.wait(ready.index(slot), phase)
        x = x_ring.index(slot).slice(FIRST, ROWS)
        w = w_ring.index(slot).slice(0, WIDTH).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        # One product runs while the next is asked for; the slot of the one before is done with.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index(_before(slot, SLOTS)), count=1, pred=step > 0)
        slot, phase = _next(slot, phase, SLOTS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(_before(slot, SLOTS)), count=1)
    return acc, slot, phase


@gluon.jit
def _store(y_desc, out, y, m, n, DTYPE: gl.constexpr):
    """y [ROWS, outputs] float32, rounded, by way of shared memory that the store before no longer reads."""
    ROWS: gl.constexpr = y.shape[0]
    BOX: gl.constexpr = y_desc.block_type.shape[1]
    tma.store_wait(0)
    put_boxes(out, y, DTYPE)
    fence_async_shared()
    store_tile(y_desc, [m, n], out.slice(0, ROWS))
    if y.shape[1] != BOX:
        store_tile(y_desc, [m, n + BOX], out.slice(ROWS, ROWS))


@gluon.jit
def _sum_chunks_aside(
    y_desc, ring, out, slot, phase, m, n, steps,
    FIRST: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A tile whose total doesn't fit beside its accumulator: its right half is held where y will be stored from."""
    HALF: gl.constexpr = WIDTH // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # A quad of lanes holds eight columns of a row: turned by row, eight rows at once meet no bank twice.
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    if HAS_REINTERPRET:
        held = out.reinterpret(gl.float32, [ROWS, HALF], TURNED)
    else:
        held = out._reinterpret(gl.float32, [ROWS, HALF], TURNED)
    total = gl.zeros([ROWS, HALF], gl.float32, layout=LAYOUT)
    for part in range(CHUNKS):
        acc, slot, phase = _sum_steps(ring, slot, phase, steps, FIRST, ROWS, WIDTH)
        left, right = halves(acc)
        total += left  # 0 + left is left: a sum that starts at +0 never becomes -0
        if part > 0:
            right += held.load(LAYOUT)
        if part < CHUNKS - 1:
            if part == 0:
                tma.store_wait(0)
            held.store(right)
        else:
            out.slice(0, ROWS).store(total.to(DTYPE))
            out.slice(ROWS, ROWS).store(right.to(DTYPE))
            fence_async_shared()
            store_tile(y_desc, [m, n], out.slice(0, ROWS))
            store_tile(y_desc, [m, n + HALF], out.slice(ROWS, ROWS))
    return slot, phase


@gluon.jit
def _multiply_unit(
    y, ring, out, slot, phase, turn, m, n, part, work, strides,
    FIRST: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, EPILOGUE: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    M, N, steps = work[0], work[1], work[2]
    y_stride, part_stride = strides
    m += FIRST
    if EPILOGUE == PARTS:
        acc, slot, phase = _sum_steps(ring, slot, phase, steps, FIRST, ROWS, WIDTH)
        ms = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        ns = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc.type.layout))
        to = y + part.to(gl.int64) * part_stride + ms.to(gl.int64)[:, None] * y_stride + ns[None, :]
        gl.store(to, acc, mask=(ms < M)[:, None] & (ns < N)[None, :])
    elif CHUNKS > 1 and ROWS * WIDTH > 64 * 128:
        slot, phase = _sum_chunks_aside(y, ring, out, slot, phase, m, n, steps, FIRST, ROWS, WIDTH, CHUNKS, DTYPE)
    elif EPILOGUE == TURNED:
        acc, slot, phase = _sum_steps(ring, slot, phase, steps, FIRST, ROWS, WIDTH)
        store_turned(y, out, turn, acc, m, n, M, DTYPE)
    else:
        acc, slot, phase = _sum_steps(ring, slot, phase, steps, FIRST, ROWS, WIDTH)
        for _ in range(CHUNKS - 1):
            more, slot, phase = _sum_steps(ring, slot, phase, steps, FIRST, ROWS, WIDTH)
            acc += more
        if EPILOGUE == PAIR:
            gate, up = halves(acc)
            _store(y, out, silu_mul(gate, up, DTYPE), m, n, DTYPE)
        else:
            _store(y, out, acc, m, n, DTYPE)
    return slot, phase


@gluon.jit
def _multiply(
    y, angles_ready, ring, aside, work, strides,
    WHICH: gl.constexpr, OUTS: gl.constexpr, CHUNKS: gl.constexpr, SPLIT: gl.constexpr, EPILOGUE: gl.constexpr,
    GROUP_M: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    M, N, whole, cut = work[0], work[1], work[3], work[4]
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    out = aside.index(WHICH)
    slot = 0
    phase = 0
    turn = 0  # angles are there once a unit
    for unit in range(gl.program_id(0), whole, gl.num_programs(0)):
        m, n, part = _place(unit, M, N, BLOCK_M, OUTS, SPLIT, GROUP_M)
        slot, phase = _multiply_unit(
            y, ring, out, slot, phase, (angles_ready, turn), m, n, part, work, strides,
            WHICH * ROWS, ROWS, BLOCK_N, CHUNKS, EPILOGUE, DTYPE,
        )  # fmt: skip
        turn ^= 1
    if EPILOGUE != TURNED or aside.shape[2] < OUTS:
        for half in range(gl.program_id(0), cut, gl.num_programs(0)):
            m, n, part = _place(whole + half // 2, M, N, BLOCK_M, OUTS, SPLIT, GROUP_M)
            n += half % 2 * (OUTS // 2)
            slot, phase = _multiply_unit(
                y, ring, out, slot, phase, (angles_ready, turn), m, n, part, work, strides,
                WHICH * ROWS, ROWS, BLOCK_N // 2, CHUNKS, EPILOGUE, DTYPE,
            )  # fmt: skip
            turn ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "steps", "whole", "cut", "shift"])
def wide_kernel(
    x_desc, w_desc, y, M, N, steps, whole, cut, y_stride, part_stride,
    angles_desc, k_pool, v_pool, cells, kv_width, shift,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
    CHUNKS: gl.constexpr, EPILOGUE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Grid (programs). Units of work are tiles, or parts of tiles: `whole` of them as they are, then `cut` halves of
    the rest. BLOCK_N counts rows of W, gate and up together; `steps` of BLOCK_K inputs are a chunk. y is a descriptor
    of [M, N], or float32 [CHUNKS, M, N] for PARTS. Descriptors fill what lies outside with 0 and don't store it.

    TURNED: y is q [M, y_stride]; angles are cos, then sin [2 M, d]; k and v of a row go to its cell plus `shift` of
    pools of cells of kv_width. Others take None for these."""
    OUTS: gl.constexpr = BLOCK_N // 2 if EPILOGUE == PAIR else BLOCK_N
    SPLIT: gl.constexpr = CHUNKS if EPILOGUE == PARTS else 1
    WIDTH: gl.constexpr = angles_desc.block_type.shape[1] if EPILOGUE == TURNED else OUTS // 2
    ASIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, WIDTH], DTYPE)
    x_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, BLOCK_K], w_desc.layout)
    aside = gl.allocate_shared_memory(DTYPE, [2, 8 if EPILOGUE == PARTS else BLOCK_M, WIDTH], ASIDE)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    angles_ready = ready
    if EPILOGUE == TURNED:  # nobody waits for it otherwise, and its place would be given to others
        angles_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(angles_ready, count=1)
    fence_async_shared()
    ring = (x_ring, w_ring, ready, free)
    work = (M, N, steps, whole, cut)
    strides = (y_stride, part_stride)
    to = (y, k_pool, v_pool, cells, y_stride, kv_width, shift) if EPILOGUE == TURNED else y
    angles = (angles_desc, angles_ready)
    gl.warp_specialize([
        (_multiply, (to, angles_ready, ring, aside, work, strides, 0, OUTS, CHUNKS, SPLIT, EPILOGUE, GROUP_M, DTYPE)),
        (_multiply, (to, angles_ready, ring, aside, work, strides, 1, OUTS, CHUNKS, SPLIT, EPILOGUE, GROUP_M, DTYPE)),
        (_copy, (x_desc, w_desc, angles, ring, aside, work, OUTS, CHUNKS, SPLIT, EPILOGUE, GROUP_M)),
    ], [4, 1], [MULTIPLYING_REGISTERS, COPYING_REGISTERS])  # fmt: skip


def wide_product(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    epilogue: str,
    chunks: int,
    out: Tensor | None,
    turned: TurnedRows | None = None,
) -> Tensor:
    """As `gemm_triton.product`, without bias, rows, counts and the epilogue "float". Raises RuntimeError where the card
    or the dtype has no such products; its torch twin is `gemm_triton.plain_product`.

    With the epilogue "turned", `turned` says what becomes of a QKV product that `candidates.can_turn` allows, and
    the result is its q; the twin is that product and `rope_kv_triton.rope_kv`.
    """
    if not multiplies_in_groups(x.device) or x.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"no warp-group products of {x.dtype} on {x.device}")
    is_pair, is_parts = epilogue == "pair", epilogue == "parts"
    (m, k), n = x.shape, weight.shape[0] // 2 if is_pair else weight.shape[0]
    chunk, dtype = chunk_length(k, chunks), TL_DTYPES[x.dtype]
    assert chunks == 1 or chunk % config.block_k == 0, (k, chunks, config)
    assert weight.shape[1] == k and x.stride(1) == weight.stride(1) == 1, (x.shape, weight.shape)
    if turned is not None:
        out = turned.q
    elif out is None:
        out = empty_product(x, m, n, epilogue, chunks)
    outs = config.block_n // 2 if is_pair else config.block_n
    units = triton.cdiv(m, config.block_m) * triton.cdiv(n, outs) * (chunks if is_parts else 1)
    whole, cut = shared_out(units, multiprocessors(x.device))

    def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)

    extra: tuple[object, ...] = (None,) * 6
    if turned is not None:
        angles, pool, head = turned.places.angles, turned.k_pool, turned.k_pool.shape[3]
        assert epilogue == "turned" and out.is_contiguous() and len(turned.places.cells) == m, (epilogue, out.shape, m)
        described_angles = described(angles.view(2 * m, head), config.block_m // 2, head)
        whole, cut = (whole, cut) if outs > head else (units, 0)
        shift = turned.layer * pool.shape[1]
        extra = described_angles, pool, turned.v_pool, turned.places.cells, pool.shape[2] * head, shift
    wide_kernel[(min(multiprocessors(x.device), max(whole, cut)),)](
        described(x, config.block_m, config.block_k),
        described(weight, outs // 2, config.block_k),
        out if is_parts or turned is not None else described(out, config.block_m // 2, outs // 2),
        m,
        n,
        triton.cdiv(chunk, config.block_k),
        whole,
        cut,
        out.stride(-2),
        out.stride(0),
        *extra,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SLOTS=config.stages,
        CHUNKS=chunks,
        EPILOGUE=EPILOGUES[epilogue],
        DTYPE=dtype,
        enable_fp_fusion=True,
        num_warps=4,
    )
    return out


def turn_product(x: Tensor, weight: Tensor, config: GemmConfig, turned: TurnedRows) -> Tensor:
    """A QKV product that turns its rows and writes them where they go; q."""
    return wide_product(x, weight, config, "turned", 1, None, turned)


def shared_out(units: int, programs: int) -> tuple[int, int]:
    """(units that stay whole, halves of the others): a last round that at most half of the programs have a unit for is
    cut in two."""
    rest = units % programs
    return (units, 0) if 2 * rest > programs else (units - rest, 2 * rest)
