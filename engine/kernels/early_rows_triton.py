# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of a few rows that begin before their input is there.

Owns one Gluon kernel, for Hopper GPUs. As in `early_triton`, programs fill a ring in shared memory with weights, which
nobody writes, then wait for the launch before, and only then ask for x, which has a ring of its own. One thread asks
the tensor copy engine for everything. A tile of weights is the left side of a warp group's product and x the right one,
so that 16 to 128 rows cost what they need and no registers hold either. The order of the K sum is that of
`gemm_triton`: ascending steps into one float32 accumulator, or one for each chunk. It must not know which product it
computes.
"""

from __future__ import annotations

from functools import cache

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epicycle.engine.kernels.early_triton import EPILOGUES, PAIR, PARTS
from epicycle.engine.kernels.gluon_common import load_tile, silu_mul
from epicycle.engine.kernels.products import GemmConfig, chunk_length
from epicycle.engine.kernels.triton_common import TL_DTYPES, empty_product


@gluon.jit
def _ask_weights(
    w_desc, ring, bars, step, wanted, begin, first, N,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Weights of step `step` on their way to its place in the ring, if `wanted`."""
    stage = step % STAGES
    bar = bars.index(stage)
    mbarrier.expect(bar, TILES * BLOCK_N * BLOCK_K * 2, wanted)
    for tile in gl.static_range(TILES):
        load_tile(w_desc, [first + tile * N, begin + step * BLOCK_K], bar, ring.index(stage * TILES + tile), wanted)


@gluon.jit
def _ask_x(
    x_desc, x_ring, bars, step, wanted, begin, row,
    STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    stage = step % STAGES
    bar = bars.index(stage)
    mbarrier.expect(bar, BLOCK_M * BLOCK_K * 2, wanted)
    load_tile(x_desc, [row, begin + step * BLOCK_K], bar, x_ring.index(stage), wanted)


@gluon.jit(do_not_specialize=["M"])
def early_rows_kernel(
    x_desc, w_desc, y_ptr, M, N, K, y_stride, part_stride, chunk,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, EPILOGUE: gl.constexpr, DTYPE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, parts, tiles of M), descriptors of x [M, K] and w [N or 2 N, K]. What lies outside is read as
    0."""
    gdc_launch_dependents()
    TILES: gl.constexpr = 2 if EPILOGUE == PAIR else 1
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    first = gl.program_id(0) * BLOCK_N
    part = gl.program_id(1)
    row = gl.program_id(2) * BLOCK_M
    begin = part * chunk
    end = gl.minimum(begin + chunk, K)
    steps = (end - begin + BLOCK_K - 1) // BLOCK_K

    ring = gl.allocate_shared_memory(DTYPE, [STAGES * TILES, BLOCK_N, BLOCK_K], SHARED)
    x_ring = gl.allocate_shared_memory(DTYPE, [X_STAGES, BLOCK_M, BLOCK_K], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_bars = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(bars.index(place), count=1)
    for place in gl.static_range(X_STAGES):
        mbarrier.init(x_bars.index(place), count=1)
    for place in gl.static_range(STAGES):
        _ask_weights(w_desc, ring, bars, place, place < steps, begin, first, N, STAGES, BLOCK_N, BLOCK_K, TILES)
    gdc_wait()
    for place in gl.static_range(X_STAGES):
        _ask_x(x_desc, x_ring, x_bars, place, place < steps, begin, row, X_STAGES, BLOCK_M, BLOCK_K)

    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    for step in range(steps):
        stage, x_stage = step % STAGES, step % X_STAGES
        mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
        mbarrier.wait(x_bars.index(x_stage), (step // X_STAGES) & 1)
        x = x_ring.index(x_stage).permute((1, 0))
        acc = warpgroup_mma(ring.index(stage * TILES), x, acc, is_async=True)
        if EPILOGUE == PAIR:
            up = warpgroup_mma(ring.index(stage * TILES + 1), x, up, is_async=True)
        # Products end in order: this far, the step before has been read and its place is free.
        if EPILOGUE == PAIR:
            acc, up = warpgroup_mma_wait(num_outstanding=TILES, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(num_outstanding=TILES, deps=(acc,))
        coming, x_coming = step - 1 + STAGES, step - 1 + X_STAGES
        wanted = (step > 0) & (coming < steps)
        _ask_weights(w_desc, ring, bars, coming, wanted, begin, first, N, STAGES, BLOCK_N, BLOCK_K, TILES)
        wanted = (step > 0) & (x_coming < steps)
        _ask_x(x_desc, x_ring, x_bars, x_coming, wanted, begin, row, X_STAGES, BLOCK_M, BLOCK_K)
    if EPILOGUE == PAIR:
        acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    outs = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    y_at = y_ptr + part.to(gl.int64) * part_stride + first
    to = y_at + outs[:, None] + (rows.to(gl.int64) * y_stride)[None, :]
    mask = (first + outs < N)[:, None] & (rows < M)[None, :]
    if EPILOGUE == PAIR:
        gl.store(to, silu_mul(acc, up, DTYPE).to(DTYPE), mask=mask)
    elif EPILOGUE == PARTS:
        gl.store(to, acc, mask=mask)
    else:
        gl.store(to, acc.to(DTYPE), mask=mask)


@cache
def shared_layout() -> gl.NVMMASharedLayout:
    """Of every tile in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def early_rows_product(
    x: Tensor, weight: Tensor, config: GemmConfig, epilogue: str, chunks: int, out: Tensor | None
) -> Tensor:
    """As `gemm_triton.product` but for "float", in dtypes of 16 bits, with multiples of 8 inputs, of up to 128 rows."""
    n = weight.shape[0] // 2 if epilogue == "pair" else weight.shape[0]
    (m, k), chunk = x.shape, chunk_length(x.shape[1], chunks)
    assert epilogue == "parts" or (chunks == 1 and epilogue in ("plain", "pair")), (chunks, epilogue)
    assert weight.shape[1] == k and x.dtype.itemsize == 2, (x.shape, x.dtype, weight.shape)
    out = empty_product(x, m, n, epilogue, chunks) if out is None else out
    early_rows_kernel[(triton.cdiv(n, config.block_n), chunks, triton.cdiv(m, config.block_m))](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k], shared_layout()),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k], shared_layout()),
        out,
        m,
        n,
        k,
        out.stride(-2),
        out.stride(0),
        chunk,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        X_STAGES=config.x_stages,
        EPILOGUE=EPILOGUES[epilogue],
        DTYPE=TL_DTYPES[x.dtype],
        WARPS=config.warps,
        enable_fp_fusion=True,
        num_warps=config.warps,
        launch_pdl=True,
    )
    return out
