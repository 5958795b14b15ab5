# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of one row that begin before their input is there.

Owns one Gluon kernel, for cards that can start a launch while the one before it still runs (Hopper and later). Its
programs fill shared memory with weights, which nobody writes, then wait for the launch before, and only then read x. So
memory is busy while a norm or attention runs, which at one row is most of what can be won. The order of the K sum is
that of `gemm_triton`: ascending steps into one float32 accumulator, or one for each chunk. It must not know which
product it computes.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.gluon_common import HAS_REINTERPRET, load_later, silu_mul
from epicycle.engine.kernels.products import GemmConfig, chunk_length
from epicycle.engine.kernels.triton_common import TL_DTYPES, empty_product, next_power

EPILOGUES = {"plain": 0, "float": 1, "pair": 2, "parts": 3}
PLAIN, FLOAT, PAIR, PARTS = (gl.constexpr(EPILOGUES[name]) for name in ("plain", "float", "pair", "parts"))


@gluon.jit
def _ask(stage, w_rows, held_rows, start, end, MASK_N: gl.constexpr, MASK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of the tile from input `start` on their way to one stage of the ring."""
    ks = start + gl.arange(0, stage.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = w_rows[:, None] + ks[None, :]
    if MASK_K:
        load_later(stage, at, mask=held_rows[:, None] & (ks < end)[None, :])
    elif MASK_N:
        load_later(stage, at, mask=held_rows[:, None] & (ks >= 0)[None, :])
    else:
        load_later(stage, at)


@gluon.jit(do_not_specialize=["tile_height"])
def early_kernel(
    x_ptr, w_ptr, y_ptr, N, K, x_stride, w_stride, y_stride, part_stride, chunk, tile_height,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, MASK_N: gl.constexpr,
    MASK_K: gl.constexpr, EPILOGUE: gl.constexpr, DTYPE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, parts, rows). STEPS is a power of two that holds the steps of a part."""
    gdc_launch_dependents()
    LANES_K: gl.constexpr = BLOCK_K // 8 if BLOCK_K < 256 else 32
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_K, LANES_K], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    SHARED_X: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=0, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(parent=MMA, operand_index=1, k_width=2)

    height = BLOCK_N
    if MASK_N:
        height = tile_height
    first = gl.program_id(0) * height
    part = gl.program_id(1)
    row = gl.program_id(2)
    begin = part * chunk
    end = gl.minimum(begin + chunk, K)
    steps = (end - begin + BLOCK_K - 1) // BLOCK_K

    ns = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    held_rows = ns < gl.minimum(first + height, N)
    w_rows = w_ptr + (ns % N).to(gl.int64) * w_stride
    up_offset = N.to(gl.int64) * w_stride
    ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    if EPILOGUE == PAIR:
        up_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            _ask(ring.index(stage), w_rows, held_rows, begin + stage * BLOCK_K, end, MASK_N, MASK_K, COPY)
            if EPILOGUE == PAIR:
                up_rows = w_rows + up_offset
                _ask(up_ring.index(stage), up_rows, held_rows, begin + stage * BLOCK_K, end, MASK_N, MASK_K, COPY)
        async_copy.commit_group()

    gdc_wait()
    flat = gl.allocate_shared_memory(DTYPE, [STEPS * BLOCK_K], SHARED_X)
    lane = gl.arange(0, STEPS * BLOCK_K, layout=FLAT)
    flat.store(gl.load(x_ptr + row.to(gl.int64) * x_stride + begin + lane, mask=lane < end - begin, other=0.0))
    if HAS_REINTERPRET:
        x_steps = flat.reinterpret(DTYPE, [STEPS, BLOCK_K], SHARED_X)
    else:
        x_steps = flat._reinterpret(DTYPE, [STEPS, BLOCK_K], SHARED_X)

    whole = gl.zeros([16, BLOCK_K], DTYPE, layout=LEFT)
    acc = gl.zeros([16, BLOCK_N], gl.float32, layout=MMA)
    up = gl.zeros([16, BLOCK_N], gl.float32, layout=MMA)
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        coming = step + STAGES - 1
        if coming < steps:
            _ask(ring.index(coming % STAGES), w_rows, held_rows, begin + coming * BLOCK_K, end, MASK_N, MASK_K, COPY)
            if EPILOGUE == PAIR:
                up_rows = w_rows + up_offset
                to = up_ring.index(coming % STAGES)
                _ask(to, up_rows, held_rows, begin + coming * BLOCK_K, end, MASK_N, MASK_K, COPY)
        async_copy.commit_group()
        # Sixteen equal rows: a tile of the matrix unit has no fewer, and a row's sum doesn't see the others.
        x = gl.expand_dims(x_steps.index(step).load(gl.SliceLayout(0, LEFT)), 0)
        x, _ = gl.broadcast(x, whole)
        w = ring.index(step % STAGES).permute((1, 0)).load(RIGHT)
        acc = mma_v2(x, w, acc, input_precision="ieee")
        if EPILOGUE == PAIR:
            w = up_ring.index(step % STAGES).permute((1, 0)).load(RIGHT)
            up = mma_v2(x, w, up, input_precision="ieee")

    outs = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
    is_held = (outs < height) & (first + outs < N)
    is_first = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA)) == 0
    to = y_ptr + row.to(gl.int64) * y_stride + part.to(gl.int64) * part_stride + first + outs
    to, _ = gl.broadcast(to[None, :], acc)
    mask = is_first[:, None] & is_held[None, :]
    if EPILOGUE == PAIR:
        gl.store(to, silu_mul(acc, up, DTYPE).to(DTYPE), mask=mask)
    elif EPILOGUE == PARTS:
        gl.store(to, acc, mask=mask)
    elif EPILOGUE == FLOAT:
        gl.store(to, acc.to(DTYPE).to(gl.float32), mask=mask)
    else:
        gl.store(to, acc.to(DTYPE), mask=mask)


def early_product(
    x: Tensor, weight: Tensor, config: GemmConfig, epilogue: str, chunks: int, out: Tensor | None
) -> Tensor:
    """As `gemm_triton.product`, for one row or a few: every row streams the weights by itself."""
    n = weight.shape[0] // 2 if epilogue == "pair" else weight.shape[0]
    (m, k), chunk = x.shape, chunk_length(x.shape[1], chunks)
    assert chunks == 1 or epilogue == "parts", (chunks, epilogue)
    assert weight.shape[1] == k and x.stride(1) == weight.stride(1) == 1, (x.shape, weight.shape)
    out = empty_product(x, m, n, epilogue, chunks) if out is None else out
    tile_n = config.tile_rows(n)
    early_kernel[(triton.cdiv(n, tile_n), chunks, m)](
        x,
        weight,
        out,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        out.stride(-2),
        out.stride(0),
        chunk,
        tile_n,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STEPS=next_power(triton.cdiv(chunk, config.block_k)),
        STAGES=config.stages,
        MASK_N=tile_n != config.block_n or n % tile_n > 0,
        MASK_K=any(length % config.block_k for length in (chunk, k)),
        EPILOGUE=EPILOGUES[epilogue],
        DTYPE=TL_DTYPES[x.dtype],
        WARPS=config.warps,
        enable_fp_fusion=True,
        num_warps=config.warps,
        launch_pdl=True,
    )
    return out
