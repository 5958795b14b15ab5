# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products x [M, K] times W [O, K] transposed, in one order of the K sum at every M.

Owns two kernels and what may follow a product inside them. A row's bits depend on the K order alone: products run
through K in ascending steps into one float32 accumulator, or into one accumulator for each of `chunks` fixed parts of
K, which are added in order and rounded once. Tile sizes, warps and stages may differ freely. `stream` reads weights
with plain loads and is for few rows; `tile` is persistent, reads through tensor descriptors and is for many. It must
not know which product of which model it computes, nor choose between kernels: `ladder` does.

Epilogues: PLAIN rounds and stores; FLOAT stores the rounded value as float32; PAIR takes W as two stacked halves (gate,
up) and stores silu(gate) * up with its two roundings; PARTS stores each chunk's float32 sum for `norm_triton` to add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from epicycle.engine.kernels.early_rows_triton import early_rows_product
from epicycle.engine.kernels.early_triton import early_product
from epicycle.engine.kernels.ladder import STEPS, step_for
from epicycle.engine.kernels.products import GemmConfig, Product, chunk_length
from epicycle.engine.kernels.silu_triton import silu_mul
from epicycle.engine.kernels.triton_common import (
    TL_DTYPES,
    empty_product,
    multiprocessors,
    silu_mul_rounded,
)
from epicycle.engine.kernels.wide_triton import wide_product

PLAIN = tl.constexpr(0)
FLOAT = tl.constexpr(1)
PAIR = tl.constexpr(2)
PARTS = tl.constexpr(3)
EPILOGUES = {"plain": 0, "float": 1, "pair": 2, "parts": 3}
GLUON_PRODUCTS = {
    "early": early_product,
    "rows": early_rows_product,
    "wide": wide_product,
    "wide-parts": wide_product,
}


@triton.jit
def _load_block(rows, row_mask, ks, end, MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr):
    if MASK_ROWS and MASK_K:
        return tl.load(rows + ks[None, :], mask=row_mask[:, None] & (ks < end)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(rows + ks[None, :], mask=row_mask[:, None], other=0.0)
    if MASK_K:
        return tl.load(rows + ks[None, :], mask=(ks < end)[None, :], other=0.0)
    return tl.load(rows + ks[None, :])


@triton.jit
def _sum_range(
    x_rows, x_mask, w_rows, w_mask, begin, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N] over inputs begin .. end."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = _load_block(x_rows, x_mask, ks, end, True, MASK_K)
        w = _load_block(w_rows, w_mask, ks, end, MASK_N, MASK_K)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _sum_range_pair(
    x_rows, x_mask, w_rows, w_mask, up_offset, begin, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = _load_block(x_rows, x_mask, ks, end, True, MASK_K)
        w_gate = _load_block(w_rows, w_mask, ks, end, MASK_N, MASK_K)
        w_up = _load_block(w_rows + up_offset, w_mask, ks, end, MASK_N, MASK_K)
        gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
    return gate, up


@triton.jit(do_not_specialize=["M", "tile_height"])
def stream_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, rows_ptr, count_ptr,
    M, N, K, x_stride, w_stride, y_stride, part_stride, chunk, tile_height,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EPILOGUE: tl.constexpr, MASK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of M x tiles of N, parts). Programs with the same weights are neighbours. A tile of BLOCK_N weight
    rows holds tile_height of them if MASK_N: what deals them out evenly needn't be a power of two.

    y [M, N], or float32 [CHUNKS, M, N] for PARTS, where a program sums one chunk. rows_ptr [M] int32 names the rows of
    x to read; count_ptr [1] int32 says how many of M are there, and programs beyond return at once.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    tile_n = tl.program_id(0) // tiles_m
    live = M
    if HAS_COUNT:
        live = tl.minimum(tl.load(count_ptr), M)
        if tile_m * BLOCK_M >= live:
            return
    ms = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    height = BLOCK_N
    if MASK_N:
        height = tile_height
    ns = tile_n * height + tl.arange(0, BLOCK_N)
    m_mask = ms < live
    n_mask = ns < tl.minimum(tile_n * height + height, N)
    source = ms.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows_ptr + ms, mask=m_mask, other=0).to(tl.int64)
    x_rows = x_ptr + source[:, None] * x_stride
    w_rows = w_ptr + (ns % N).to(tl.int64)[:, None] * w_stride
    y_mask = m_mask[:, None] & n_mask[None, :]
    y_at = ms.to(tl.int64)[:, None] * y_stride + ns[None, :]
    if EPILOGUE == PAIR:
        up_offset = N.to(tl.int64) * w_stride
        gate, up = _sum_range_pair(
            x_rows, m_mask, w_rows, n_mask, up_offset, 0, K, BLOCK_M, BLOCK_N, BLOCK_K, MASK_N, MASK_K
        )
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        tl.store(y_ptr + y_at, silu_mul_rounded(gate, up, DTYPE).to(DTYPE), mask=y_mask)
    elif EPILOGUE == PARTS:
        part = tl.program_id(1)
        begin = part * chunk
        end = tl.minimum(begin + chunk, K)
        acc = _sum_range(x_rows, m_mask, w_rows, n_mask, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, MASK_N, MASK_K)
        tl.store(y_ptr + part.to(tl.int64) * part_stride + y_at, acc, mask=y_mask)
    else:
        total = _sum_range(
            x_rows, m_mask, w_rows, n_mask, 0, tl.minimum(chunk, K), BLOCK_M, BLOCK_N, BLOCK_K, MASK_N, MASK_K
        )
        for part in tl.static_range(1, CHUNKS):
            end = tl.minimum((part + 1) * chunk, K)
            total += _sum_range(
                x_rows, m_mask, w_rows, n_mask, part * chunk, end, BLOCK_M, BLOCK_N, BLOCK_K, MASK_N, MASK_K
            )
        if HAS_BIAS:
            total += tl.load(bias_ptr + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
        y = total.to(DTYPE)
        if EPILOGUE == FLOAT:
            tl.store(y_ptr + y_at, y.to(tl.float32), mask=y_mask)
        else:
            tl.store(y_ptr + y_at, y, mask=y_mask)


@triton.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, so that neighbours share weights and inputs in L2."""
    width = GROUP_M * tiles_n
    first = (tile // width) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % height), (tile % width) // height


@triton.jit(do_not_specialize=["M", "chunk_steps"])
def tile_kernel(
    x_desc, w_desc, y_desc, count_ptr, M, N, K, chunk_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    CHUNKS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_COUNT: tl.constexpr, FLATTEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Persistent: tiles go round the programs. Descriptors fill what lies outside with 0."""
    live = M
    if HAS_COUNT:
        live = tl.minimum(tl.load(count_ptr), M)
    tiles_m = tl.cdiv(live, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    if CHUNKS > 1:
        # One loop over the chunks of all its tiles, so that reading ahead goes on from one chunk to the next.
        tiles = tl.maximum(0, tiles_m * tiles_n - tl.program_id(0))
        sums = tl.cdiv(tiles, tl.num_programs(0)) * CHUNKS
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for number in tl.range(0, sums, flatten=FLATTEN):
            part = number % CHUNKS
            tile_m, tile_n = _tile_of(
                tl.program_id(0) + number // CHUNKS * tl.num_programs(0), tiles_m, tiles_n, GROUP_M
            )
            m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(chunk_steps):  # what a last, shorter chunk lacks is read as 0
                k = (part * chunk_steps + step) * BLOCK_K
                acc = tl.dot(x_desc.load([m, k]), w_desc.load([n, k]).T, acc, input_precision="ieee")
            # 0 + acc is acc: a sum that starts at +0 never becomes -0.
            total = tl.where(part == 0, 0.0, total) + acc
            if part == CHUNKS - 1:
                y_desc.store([m, n], total.to(DTYPE))
    else:
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
            tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP_M)
            m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
            if EPILOGUE == PAIR:
                gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for step in range(steps):
                    x = x_desc.load([m, step * BLOCK_K])
                    gate = tl.dot(x, w_desc.load([n, step * BLOCK_K]).T, gate, input_precision="ieee")
                    up = tl.dot(x, w_desc.load([N + n, step * BLOCK_K]).T, up, input_precision="ieee")
                rounded_gate, rounded_up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
                y_desc.store([m, n], silu_mul_rounded(rounded_gate, rounded_up, DTYPE).to(DTYPE))
            else:
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for step in range(steps):
                    x = x_desc.load([m, step * BLOCK_K])
                    total = tl.dot(x, w_desc.load([n, step * BLOCK_K]).T, total, input_precision="ieee")
                y_desc.store([m, n], total.to(DTYPE))


def product(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    *,
    epilogue: str = "plain",
    chunks: int = 1,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    count: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K] (rows may be strided) times weight [O, K] transposed, run as `config` says.

    Returns [M, O] of x's dtype, [M, O] float32 for "float", [M, O / 2] for "pair", [chunks, M, O] float32 for "parts".
    `rows` [M'] int32 picks rows of x (the result has M' rows); `count` [1] int32 on the device leaves rows of the
    result from there on unwritten. Only the stream kernel takes a bias, rows and the epilogues "float" and "parts".
    """
    m = x.shape[0] if rows is None else rows.shape[0]
    n = weight.shape[0] // 2 if epilogue == "pair" else weight.shape[0]
    assert weight.shape[1] == x.shape[1] and x.stride(1) == weight.stride(1) == 1, (x.shape, weight.shape)
    out = empty_product(x, m, n, epilogue, chunks) if out is None else out
    if config.kernel == "tile":
        assert bias is None and rows is None and epilogue in ("plain", "pair"), (config, epilogue)
        _run_tile(x, weight, out, config, epilogue, chunks, count)
    else:
        _run_stream(x, weight, out, config, epilogue, chunks, bias, rows, count)
    return out


def _run_stream(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: GemmConfig,
    epilogue: str,
    chunks: int,
    bias: Tensor | None,
    rows: Tensor | None,
    count: Tensor | None,
) -> None:
    m, n, k = out.shape[-2], out.shape[-1], x.shape[1]
    chunk = chunk_length(k, chunks)
    tile_n = config.tile_rows(n)
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, tile_n), chunks if epilogue == "parts" else 1)
    stream_kernel[grid](
        x,
        weight,
        out,
        out if bias is None else bias,
        out if rows is None else rows,
        out if count is None else count,
        m,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        out.stride(-2),
        out.stride(0),
        chunk,
        tile_n,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        MASK_N=tile_n != config.block_n,
        CHUNKS=chunks,
        EPILOGUE=EPILOGUES[epilogue],
        MASK_K=any(length % config.block_k for length in (chunk, k)),
        HAS_BIAS=bias is not None,
        HAS_ROWS=rows is not None,
        HAS_COUNT=count is not None,
        DTYPE=TL_DTYPES[x.dtype],
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _run_tile(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, epilogue: str, chunks: int, count: Tensor | None
) -> None:
    (m, n), k = out.shape, x.shape[1]
    assert chunks == 1 or chunk_length(k, chunks) % config.block_k == 0, (k, chunks, config)
    # A block that reached over the end of the gate half would read rows of the up half: harmless, they aren't stored.
    blocks = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    programs = min(multiprocessors(x.device), blocks)
    tile_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n]),
        out if count is None else count,
        m,
        n,
        k,
        chunk_length(k, chunks) // config.block_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        CHUNKS=chunks,
        EPILOGUE=EPILOGUES[epilogue],
        HAS_COUNT=count is not None,
        FLATTEN=config.flatten,
        DTYPE=TL_DTYPES[x.dtype],
        enable_fp_fusion=True,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def run_product(
    kind: Product,
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    out: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """`kind` on x as `config` says: [M, O], or float32 [chunks, M, O] for whoever adds parts up (see `norm_triton`)
    where the stream kernel runs a product of several chunks."""
    if config.kernel in ("library", "exact"):
        return _run_library(kind, x, weight, is_exact=config.kernel == "exact")
    epilogue = stored_as(kind, config)
    if not config.reads_count:
        assert count is None, (kind, config)
        return GLUON_PRODUCTS[config.kernel](x, weight, config, epilogue, kind.chunks, out)
    return product(x, weight, config, epilogue=epilogue, chunks=kind.chunks, out=out, count=count)


def stored_as(kind: Product, config: GemmConfig) -> str:
    """The epilogue that `config` uses for `kind`."""
    return "parts" if kind.chunks > 1 and config.kernel not in ("tile", "wide") else kind.epilogue


def _run_library(kind: Product, x: Tensor, weight: Tensor, *, is_exact: bool) -> Tensor:
    """Of several chunks only where bits are free: the library has an order of its own."""
    if is_exact:
        y = torch.nn.functional.linear(x, weight)
    else:
        blocks = [_library_rows(block, weight) for block in x.split(STEPS[-1])]
        y = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    if kind.epilogue == "pair":
        return silu_mul(y[:, : kind.outputs], y[:, kind.outputs :])
    return y.float() if kind.epilogue == "float" else y


def _library_rows(x: Tensor, weight: Tensor) -> Tensor:
    """The library's order may follow from the number of rows, so it only ever sees numbers that were checked."""
    short = step_for(len(x)) - len(x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x
    return torch.nn.functional.linear(padded, weight)[: len(x)]


def added_parts(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts [P, M, O] of a product added in order and rounded, as `norm_triton` does on its way."""
    total = y[0]
    for part in y[1:]:
        total = total + part
    return total.to(dtype)


def plain_product(
    x: Tensor, weight: Tensor, *, epilogue: str = "plain", chunks: int = 1, bias: Tensor | None = None
) -> Tensor:
    """The torch twin of `product`: chunk sums in float32, added in order, rounded where the kernels round."""
    k = x.shape[1]
    chunk = chunk_length(k, chunks)
    starts = range(0, chunks * chunk, chunk)
    parts = torch.stack([x[:, at : at + chunk].float() @ weight[:, at : at + chunk].float().T for at in starts])
    if epilogue == "parts":
        return parts
    y = added_parts(parts, torch.float32)
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    if epilogue == "pair":
        gate, up = y.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    return y.float() if epilogue == "float" else y
