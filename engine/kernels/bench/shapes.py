"""The shapes that the kernel benchmark runs: products of both models, and their floors.

Owns model sizes as plain numbers, so that the benchmark runs where the configuration reader's dependencies don't exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from epicycle.engine.kernels.candidates import TURNED, can_turn
from epicycle.engine.kernels.products import GemmConfig, Product, canonical_chunks

BANDWIDTH_TB_S = 4.2  # measured ceilings of one H200; the run measures them again and prints both
MATMUL_TFLOP_S = 755.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's core. `pairs` is the rotation's convention."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    loops: int
    pairs: bool
    norm_stage: str

    @property
    def qkv(self) -> Product:
        return Product(f"{self.name}.qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden)

    @property
    def out(self) -> Product:
        inputs = self.heads * self.head_dim
        return Product(f"{self.name}.out", self.hidden, inputs, chunks=canonical_chunks(self.hidden, inputs))

    @property
    def gate_up(self) -> Product:
        return Product(f"{self.name}.gate_up", self.intermediate, self.hidden, "pair")

    @property
    def down(self) -> Product:
        chunks = canonical_chunks(self.hidden, self.intermediate)
        return Product(f"{self.name}.down", self.hidden, self.intermediate, chunks=chunks)

    @property
    def head(self) -> Product:
        return Product(f"{self.name}.head", self.vocab, self.hidden, "float")

    @property
    def adapter(self) -> Product:
        return Product(f"{self.name}.adapter", self.hidden, 2 * self.hidden)

    def core_products(self) -> list[Product]:
        """The products of a layer."""
        return [self.qkv, self.out, self.gate_up, self.down]

    def products(self) -> list[Product]:
        """Everything that is timed, the other split of the deep ones included."""
        other = [
            Product(f"{base.name}.by{chunks}", base.outputs, base.inputs, chunks=chunks)
            for base in (self.out, self.down)
            for chunks in ((1,) if base.chunks > 1 else (4,))
        ]
        adapter = [self.adapter] if self.pairs else []
        return [*self.core_products(), *adapter, *other, self.head]


OURO = Shape("ouro", 2048, 16, 16, 128, 5632, 49152, 24, 4, False, "sandwich")
HUGINN = Shape("huginn", 5280, 55, 55, 96, 17920, 65536, 4, 32, True, "sum")
SHAPES = {shape.name: shape for shape in (OURO, HUGINN)}


def turning_configs(shape: Shape) -> list[GemmConfig]:
    """How its QKV products may run that turn their rows themselves."""
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return [config for config in TURNED if not shape.pairs and can_turn(config, shape.qkv, *heads)]


def product_floor_us(product: Product, rows: int) -> float:
    """The larger of moving every byte once and doing every operation, at the ceilings above."""
    weights = product.weight_rows * product.inputs
    moved = 2 * (weights + rows * (product.inputs + product.outputs))
    return max(moved / BANDWIDTH_TB_S, 2 * rows * weights / MATMUL_TFLOP_S) / 1e6


def layer_floor_us(shape: Shape, rows: int, context: int) -> float:
    """One layer's products and the KV its rows read."""
    kv_bytes = 2 * 2 * rows * context * shape.kv_heads * shape.head_dim
    return sum(product_floor_us(product, rows) for product in shape.core_products()) + kv_bytes / BANDWIDTH_TB_S / 1e6
