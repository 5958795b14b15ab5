"""The configurations worth trying for a product at each number of rows.

Owns the tables, and which product can't use which of them. Bits are those of the sure one in every configuration that
`ladder.choose` lets through. Must not know torch or Triton, nor how long anything takes.
"""

from __future__ import annotations

from epicycle.engine.kernels.products import LIBRARY, GemmConfig, Product, chunk_length

_FEW_ROWS = (
    GemmConfig("stream", 16, 16, 256, 2, 4),
    GemmConfig("stream", 16, 16, 256, 4, 4),
    GemmConfig("stream", 16, 16, 512, 4, 3),
    GemmConfig("stream", 16, 16, 128, 4, 6),
    GemmConfig("stream", 16, 32, 128, 4, 5),
    GemmConfig("stream", 16, 32, 256, 4, 3),
    GemmConfig("stream", 16, 64, 128, 4, 4),
    GemmConfig("stream", 16, 64, 64, 4, 6),
    # One tile for each of 132 multiprocessors, or of a quarter of them for each of four parts.
    GemmConfig("stream", 16, 64, 128, 4, 5, shares=132),
    GemmConfig("stream", 16, 64, 128, 8, 5, shares=132),
    GemmConfig("stream", 16, 64, 256, 8, 3, shares=132),
    GemmConfig("stream", 16, 128, 128, 8, 4, shares=132),
    GemmConfig("stream", 16, 64, 128, 8, 5, shares=33),
    GemmConfig("stream", 16, 64, 128, 4, 5, shares=33),
    GemmConfig("stream", 16, 32, 128, 4, 5, shares=66),
)
# By times of whole loops, not of the products alone: what a product holds in shared memory keeps others out. Half of it
# is left to the launch that follows.
_ONE_ROW = (
    GemmConfig("early", 16, 64, 128, 8, 8, shares=132),
    GemmConfig("early", 16, 128, 128, 8, 4, shares=132),
    GemmConfig("early", 16, 64, 128, 4, 6, shares=33),
    GemmConfig("early", 16, 32, 128, 4, 6),
    GemmConfig("early", 16, 64, 128, 8, 3),
)
_WIDE = (
    GemmConfig("wide", 128, 128, 64, 8, 6),
    GemmConfig("wide", 128, 256, 64, 8, 3),
    GemmConfig("wide", 128, 256, 64, 8, 4),
)
TURNED = (
    GemmConfig("turned", 128, 256, 64, 8, 3),
    GemmConfig("turned", 128, 128, 64, 8, 5),
    GemmConfig("turned", 128, 128, 64, 8, 6),
)
"""For QKV products that turn their rows and write them (`turned_triton`), by times of whole loops again."""
# Also by times of whole loops: with a ring of half a multiprocessor's memory, products are no slower by themselves, but
# what follows them is.
_EARLY_ROWS = {
    16: (
        GemmConfig("rows", 16, 64, 128, 4, 9, x_stages=5),
        GemmConfig("rows", 16, 64, 128, 4, 8, x_stages=8),
        GemmConfig("rows", 16, 64, 128, 4, 5, x_stages=5),
    ),
    32: (
        GemmConfig("rows", 32, 64, 128, 4, 8, x_stages=5),
        GemmConfig("rows", 32, 64, 128, 4, 7, x_stages=7),
        GemmConfig("rows", 32, 64, 128, 4, 5, x_stages=4),
    ),
    64: (
        GemmConfig("rows", 64, 64, 128, 4, 7, x_stages=5),
        GemmConfig("rows", 64, 64, 128, 4, 6, x_stages=6),
        GemmConfig("rows", 64, 64, 128, 4, 4, x_stages=4),
    ),
    128: (
        GemmConfig("rows", 128, 64, 128, 4, 7, x_stages=3),
        GemmConfig("rows", 128, 64, 128, 4, 5, x_stages=4),
        GemmConfig("rows", 128, 64, 128, 4, 3, x_stages=3),
    ),
}
_CANDIDATES: dict[int, tuple[GemmConfig, ...]] = {
    1: (*_ONE_ROW, *_FEW_ROWS),
    16: (*_EARLY_ROWS[16], *_FEW_ROWS),
    32: (
        *_EARLY_ROWS[32],
        GemmConfig("stream", 32, 16, 256, 4, 3),
        GemmConfig("stream", 32, 32, 128, 4, 4),
        GemmConfig("stream", 32, 64, 128, 4, 4),
        GemmConfig("stream", 32, 64, 64, 4, 5),
        GemmConfig("stream", 32, 64, 128, 4, 4, shares=132),
        GemmConfig("stream", 32, 64, 128, 8, 4, shares=132),
        GemmConfig("stream", 32, 64, 64, 4, 6, shares=132),
        GemmConfig("stream", 32, 64, 128, 4, 4, shares=33),
        GemmConfig("stream", 32, 32, 128, 4, 5, shares=66),
        GemmConfig("stream", 32, 32, 128, 4, 5),
    ),
    64: (
        *_EARLY_ROWS[64],
        GemmConfig("stream", 64, 32, 128, 4, 4),
        GemmConfig("stream", 64, 64, 128, 4, 3),
        GemmConfig("stream", 64, 64, 64, 4, 5),
        GemmConfig("stream", 64, 128, 64, 4, 4),
        GemmConfig("stream", 64, 64, 128, 4, 4, shares=132),
        GemmConfig("stream", 64, 64, 64, 4, 6, shares=132),
        GemmConfig("stream", 64, 64, 64, 8, 6, shares=132),
        GemmConfig("stream", 64, 64, 64, 4, 6, shares=33),
        GemmConfig("tile", 64, 64, 64, 4, 6),
        GemmConfig("tile", 64, 128, 64, 4, 5),
    ),
    128: (
        *_EARLY_ROWS[128],
        GemmConfig("stream", 128, 64, 64, 8, 4),
        GemmConfig("stream", 64, 64, 64, 4, 5),
        GemmConfig("tile", 128, 64, 64, 4, 6),
        GemmConfig("tile", 128, 128, 64, 8, 4),
        GemmConfig("tile", 64, 128, 64, 4, 5),
    ),
    512: (
        GemmConfig("tile", 64, 64, 64, 4, 6),
        GemmConfig("tile", 64, 128, 64, 4, 5),
        GemmConfig("tile", 128, 64, 64, 4, 6),
        GemmConfig("tile", 128, 128, 64, 8, 4),
        GemmConfig("tile", 64, 256, 64, 4, 4),
        GemmConfig("tile", 128, 256, 64, 8, 3),
        *_WIDE,
    ),
    4096: (
        GemmConfig("tile", 64, 256, 64, 4, 4),
        GemmConfig("tile", 128, 128, 64, 8, 4),
        GemmConfig("tile", 128, 256, 64, 8, 3),
        GemmConfig("tile", 128, 256, 64, 8, 3, flatten=True),
        GemmConfig("tile", 256, 128, 64, 8, 3),
        *_WIDE,
    ),
}
_SPLIT_CANDIDATES: dict[int, tuple[GemmConfig, ...]] = {
    512: (
        GemmConfig("stream", 64, 64, 64, 4, 5),
        GemmConfig("stream", 128, 64, 64, 4, 4),
        GemmConfig("stream", 128, 64, 64, 8, 4),
        GemmConfig("stream", 128, 128, 64, 8, 4),
        GemmConfig("tile", 64, 128, 64, 4, 5, flatten=True),
        GemmConfig("tile", 128, 64, 64, 4, 6, flatten=True),
        GemmConfig("tile", 128, 128, 64, 8, 4, flatten=True),
        GemmConfig("wide", 128, 64, 64, 8, 8),
        GemmConfig("wide-parts", 128, 128, 64, 8, 7),
    ),
    4096: (
        GemmConfig("tile", 64, 128, 64, 4, 5, flatten=True),
        GemmConfig("tile", 128, 64, 64, 4, 6, flatten=True),
        GemmConfig("tile", 128, 128, 64, 8, 4, flatten=True),
    ),
}
"""For products of several chunks, beside the others: few tiles leave a card half empty, tiles of every chunk don't."""
_SURE = GemmConfig("stream", 16, 32, 128, 4, 3)
EARLY_KERNELS = ("early", "rows")
EARLY_ROWS = 128  # with more, products take several waves of programs and let nobody start early
LEAST_EARLY_BYTES, MOST_EARLY_BYTES = 150 << 10, 220 << 10  # of shared memory for one program: of "rows", of either
MOST_WIDE_BYTES = 226 << 10  # and of the wide kernel, beside its barriers


def sure(product: Product) -> GemmConfig:
    """The implementation that defines a product's bits; it runs at every number of rows."""
    return _SURE


def candidates(product: Product, step: int) -> tuple[GemmConfig, ...]:
    """What is worth trying: the configurations of the first rung that holds `step` rows, without those that this
    product can't use, and the library where the product is a plain one."""
    rung = min(rows for rows in _CANDIDATES if rows >= min(step, max(_CANDIDATES)))
    split = _SPLIT_CANDIDATES.get(rung, ()) if product.chunks > 1 else ()
    fit = [config for config in (*_CANDIDATES[rung], *split) if _fits(product, config)]
    return (*fit, LIBRARY) if product.chunks == 1 else tuple(fit)


def _fits(product: Product, config: GemmConfig) -> bool:
    if config.kernel != "stream" and product.epilogue == "float":
        return False
    if config.kernel.startswith("wide"):
        return _fits_wide(product, config)
    if config.kernel == "early" and not _fits_early(product, config):
        return False
    if config.kernel == "rows" and not _fits_early_rows(product, config):
        return False
    if config.shares and not config.block_n // 2 < config.tile_rows(product.outputs) <= config.block_n:
        return False
    # Two accumulators (gate and up, or total and chunk) must fit the register file.
    doubled = product.epilogue == "pair" or (product.chunks > 1 and config.kernel == "tile")
    return not doubled or config.block_m * config.block_n <= 64 * 32 * config.warps


def _fits_early(product: Product, config: GemmConfig) -> bool:
    """Its tiles are as many as there are, or as there are gates and ups, and its shared memory is there."""
    if (config.shares == 0) != (product.epilogue == "pair") or (config.shares == 33) != (product.chunks > 1):
        return False
    steps = -(-chunk_length(product.inputs, product.chunks) // config.block_k)
    ring = config.stages * config.block_n * (2 if product.epilogue == "pair" else 1)
    return 2 * config.block_k * (ring + (1 << (steps - 1).bit_length())) <= MOST_EARLY_BYTES


def _fits_wide(product: Product, config: GemmConfig) -> bool:
    """Its ring takes what shared memory has beside the outputs of a tile."""
    is_parts = config.kernel == "wide-parts"
    stage = (config.block_m + config.block_n) * config.block_k
    outputs = 0 if is_parts else config.block_m * config.block_n // (2 if product.epilogue == "pair" else 1)
    fits = 2 * (config.stages * stage + outputs) <= MOST_WIDE_BYTES < 2 * ((config.stages + 1) * stage + outputs)
    return fits and (product.chunks > 1 or not is_parts)


def _fits_early_rows(product: Product, config: GemmConfig) -> bool:
    """The copy engine can read its lines, and its rings are there and not much smaller than they may be. Not for
    plain products of more than 64 rows: with QKV's, whose rings keep attention out, loops of 128 rows were slower."""
    if config.block_m > 64 and product.epilogue != "pair" and product.chunks == 1:
        return False
    weights = config.stages * config.block_n * (2 if product.epilogue == "pair" else 1)
    rings = 2 * config.block_k * (weights + config.x_stages * config.block_m)
    return product.inputs % 8 == 0 and LEAST_EARLY_BYTES <= rings <= MOST_EARLY_BYTES


def can_turn(config: GemmConfig, qkv: Product, heads: int, kv_heads: int, width: int) -> bool:
    """Whether tiles hold one or two whole heads, none of them partly q or k, and angles find room. A tile must have
    more steps than the ring has slots: only then is the tile before done with its shared memory when the last step is
    asked for, and angles may come there."""
    tile, odd = config.block_n // width, config.block_n % width
    fits = tile in (1, 2) and not odd and heads % tile == kv_heads % tile == 0 and qkv.chunks == 1
    ring = config.stages * (config.block_m + config.block_n) * config.block_k
    room = 2 * (ring + 2 * config.block_m * width) <= MOST_WIDE_BYTES
    return fits and room and qkv.inputs > config.block_k * config.stages


def untimed(product: Product, rows: int) -> GemmConfig:
    """A reasonable configuration where nothing has been timed; bits are those of any other."""
    fits = [config for config in candidates(product, rows) if config.reads_count]
    wide = [config for config in fits if config.block_m >= min(rows, 64)]
    return (wide or fits)[0] if fits else sure(product)
