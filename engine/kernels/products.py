"""What a matrix product is, and how one may be run: names and numbers alone.

Owns the order of a product's sum, which is part of its `Product` and never of how it runs. Must not know torch or
Triton.
"""

from __future__ import annotations

from dataclasses import dataclass


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
