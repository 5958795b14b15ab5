"""Which implementation runs a matrix product at which number of rows.

Owns the ladder of row counts, the configurations worth trying on each step, and the start-up choice: for every product
and step the fastest implementation whose rows are all bit-equal to the sure one, which is always there to fall back to.
A product's order of summation is part of its `Product` and never of a choice. Must not know torch or Triton: running,
comparing and timing are a `Probe`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

STEPS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Row counts that are checked and timed. A call uses the choice of the first step that holds its rows."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How a kernel runs; never part of what it computes. `kernel` is "stream" or "tile" of `gemm_triton`, "early"
    (`early_triton`), "rows" (`early_rows_triton`), or "wide" of `wide_triton`, "wide-parts" where that leaves chunks to
    be added up, "turned" where it turns q, k and v.

    With `shares` the outputs are cut in that many tiles of equal height, up to block_n. block_n of the wide kernel
    counts rows of the weight, gate and up together; `x_stages` is how many steps of x the rows kernel asks for ahead,
    beside `stages` of weights.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    flatten: bool = False
    shares: int = 0
    x_stages: int = 0

    @property
    def key(self) -> str:
        tail = ("f" if self.flatten else "") + (f"of{self.shares}" if self.shares else "")
        tail += f"x{self.x_stages}" if self.x_stages else ""
        return f"{self.kernel}-{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}s{self.stages}{tail}"

    @property
    def reads_count(self) -> bool:
        """Whether it leaves out rows by a number on the device."""
        return self.kernel in ("stream", "tile")

    def tile_rows(self, outputs: int) -> int:
        """Outputs of one tile of the stream or early kernel."""
        return -(-outputs // self.shares) if self.shares else self.block_n


LIBRARY = GemmConfig("library", 0, 0, 0, 0, 0)
"""The vendor's matrix library; only ever chosen where every row equals the sure kernel's. It may take another order for
another number of rows, so it is handed a number that was checked: the ladder's next step."""
EXACT = GemmConfig("exact", 0, 0, 0, 0, 0)
"""The library on just so many rows as there are, a number that was checked too."""


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of matrix product: weight [outputs, inputs] ([2 * outputs, inputs] for "pair").

    `epilogue` is "plain", "float" or "pair" (see `gemm_triton`); `chunks` is the order of summation: that many parts
    of the inputs, each summed by itself, added in order.
    """

    name: str
    outputs: int
    inputs: int
    epilogue: str = "plain"
    chunks: int = 1

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.epilogue == "pair" else 1)


CHUNK_ALIGN = 128  # chunk borders are multiples of this, so every step of the K sum up to it divides them


def chunk_length(k: int, chunks: int) -> int:
    """Inputs of one chunk; the last may be shorter."""
    if chunks == 1:
        return k
    return -(-k // (chunks * CHUNK_ALIGN)) * CHUNK_ALIGN


def canonical_chunks(outputs: int, inputs: int) -> int:
    """In how many parts the inputs of a weight [outputs, inputs] are summed, at every number of rows.

    Part of the numerics: it follows from the shape alone. Products with few outputs and many inputs can't fill a
    card at one row unless their inputs are split.
    """
    return 4 if outputs <= 2048 <= inputs else 1


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
        GemmConfig("rows", 128, 64, 128, 4, 4, x_stages=2),
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
LATE_US = 1.5  # what a launch that isn't early loses at either end where the others are: no product alone shows it
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
    """The copy engine can read its lines, and its rings are there and not much smaller than they may be. Of many rows,
    QKV products leave room for the attention that follows: with them too, loops of 128 rows are slower."""
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


def step_for(rows: int) -> int:
    """The first step of the ladder that holds `rows`; the last one for more."""
    return next((step for step in STEPS if step >= rows), STEPS[-1])


class Probe(Protocol):
    """Runs products on the device for `choose`. `rows` are always the same first rows of one fixed input."""

    def is_equal(self, product: Product, config: GemmConfig, rows: int) -> bool:
        """True when every one of `rows` rows has the sure implementation's bits, also in shuffled order."""
        ...

    def time_us(self, product: Product, config: GemmConfig, rows: int) -> float:
        """Median time of one product with weights that no cache holds."""
        ...


@dataclass(slots=True)
class Choices:
    """The picked configuration of every (product name, step), the same among those that read a count, what was refused
    for its bits, and the numbers of rows between steps that the library may be handed as they are, by product name.
    `turned` are those of QKV products that turn their rows, where that is faster than a launch behind them."""

    picked: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)
    counted: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    exact: dict[str, frozenset[int]] = field(default_factory=dict)
    turned: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)

    def find(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run, if anything was picked."""
        found = self.picked.get((product.name, step_for(rows)))
        return EXACT if found == LIBRARY and rows in self.exact.get(product.name, ()) else found

    def find_counted(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run where the device knows how many of `rows` there are, if anything was picked."""
        return self.counted.get((product.name, step_for(rows)))

    def find_turned(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run where a QKV product is to turn its rows, if anything was picked."""
        return self.turned.get((product.name, step_for(rows)))

    def get(self, product: Product, rows: int) -> GemmConfig:
        """What to run; the sure one where nothing was picked."""
        return self.find(product, rows) or sure(product)


def choose(products: list[Product], steps: list[int], probe: Probe, *, keeps_bits: bool = True) -> Choices:
    """Time every candidate of every product and step and keep the fastest of those that are bit-equal, and the fastest
    of them that reads a count.

    Bits are compared from the fastest candidate down, so that slow ones aren't checked for nothing. One that can't run
    on this device must answer infinity as its time. Without `keeps_bits` the fastest is taken whatever its bits, and
    the library is a candidate for every product.
    """
    choices = Choices()
    for product in products:
        for step in steps:
            tried = _all(product, step) if keeps_bits else {*_all(product, step), LIBRARY}
            timed = sorted((_time_us(probe, product, config, step), config.key, config) for config in tried)
            for time_us, key, config in timed:
                at = product.name, step
                if time_us == float("inf") or at in choices.counted:
                    break
                if at in choices.picked and not config.reads_count:
                    continue
                if keeps_bits and config != sure(product) and not probe.is_equal(product, config, step):
                    choices.refused.append((*at, key))
                    continue
                choices.picked.setdefault(at, config)
                if config.reads_count:
                    choices.counted[at] = config
    return choices


def _time_us(probe: Probe, product: Product, config: GemmConfig, step: int) -> float:
    """As in a loop."""
    is_late = step <= EARLY_ROWS and config.kernel not in EARLY_KERNELS
    return probe.time_us(product, config, step) + LATE_US * is_late


def _all(product: Product, step: int) -> tuple[GemmConfig, ...]:
    found = candidates(product, step)
    return found if sure(product) in found else (*found, sure(product))
