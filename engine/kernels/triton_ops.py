"""`TritonOps`: the operations of `ops.Ops` through the GPU kernels, eagerly.

Owns which kernel serves which operation; nothing about a row's bits depends on the other rows or on their number. The
order of a product's sum follows from its weight's shape (`products.canonical_chunks`), its configuration from the
choices made at start-up. Residual adds, embedding and sigmoid are torch's own elementwise kernels. It knows no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epicycle.engine.kernels import noise_triton
from epicycle.engine.kernels.candidates import untimed
from epicycle.engine.kernels.gemm_triton import added_parts, product, run_product
from epicycle.engine.kernels.ladder import Choices
from epicycle.engine.kernels.norm_triton import gate_logit, norm
from epicycle.engine.kernels.products import GemmConfig, Product, canonical_chunks
from epicycle.engine.kernels.rope_kv_triton import rope
from epicycle.engine.kernels.silu_triton import silu_mul
from epicycle.engine.kernels.turned_triton import TurnedRows
from epicycle.engine.kernels.wide_triton import turn_product


class TritonOps:
    """Meets `ops.Ops` on tensors of one GPU."""

    def __init__(self, choices: Choices | None = None) -> None:
        self._choices = choices

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """As `Choices.told`."""
        return {} if self._choices is None else self._choices.told()

    def _config(self, kind: Product, rows: int, *, is_counted: bool = False) -> GemmConfig:
        if self._choices is None:
            return untimed(kind, rows)
        find = self._choices.find_counted if is_counted else self._choices.find
        return find(kind, rows) or untimed(kind, rows)

    def product(self, x: Tensor, weight: Tensor, epilogue: str = "plain", count: Tensor | None = None) -> Tensor:
        """A product as its kernel leaves it: `linear`'s, or float32 parts of it [P, N, O]; with epilogue "pair" of a
        fused gate and up, `silu_mul` of their products. Rows from `count` [1] int32 on are wanted by nobody."""
        kind = kind_of(weight, epilogue)
        config = self._config(kind, len(x), is_counted=count is not None)
        return run_product(kind, x, weight, config, count=count)

    def find_turned(self, weight: Tensor, rows: int) -> GemmConfig | None:
        """How a QKV product of so many rows turns them itself; None where a launch behind it does."""
        return None if self._choices is None else self._choices.find_turned(kind_of(weight), rows)

    def turn(self, x: Tensor, weight: Tensor, config: GemmConfig, turned: TurnedRows) -> Tensor:
        """A QKV product that turns its rows and writes them where they go; q."""
        return turn_product(x, weight, config, turned)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = kind_of(weight)
        if bias is None:
            y = run_product(kind, x, weight, self._config(kind, len(x)))
            return added_parts(y, x.dtype) if y.ndim == 3 else y
        config = self._config(Product("biased", kind.outputs, kind.inputs, "float"), len(x))  # never the tile kernel
        return product(x, weight, config, chunks=kind.chunks, bias=bias)

    def gate_logit(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gate_logit(x, weight, bias)

    def logits(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        kind = kind_of(weight, "float")
        return run_product(kind, x, weight, self._config(kind, len(x)), count=count)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up)

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, cos, sin, pairs=False)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(x, cos, sin, pairs=True)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(tokens, table)
        return rows if scale == 1.0 else rows * scale

    def start_noise(self, table: Tensor, seeds: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return noise_triton.draw(table, seeds, positions, width, dtype)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


def kind_of(weight: Tensor, epilogue: str = "plain") -> Product:
    """The product that multiplies by `weight`, named by its shape."""
    return product_of(weight.shape[0], weight.shape[1], epilogue)


def product_of(weight_rows: int, inputs: int, epilogue: str = "plain") -> Product:
    """The product of a weight [weight_rows, inputs]."""
    chunks = canonical_chunks(weight_rows, inputs) if epilogue == "plain" else 1
    outputs = weight_rows // 2 if epilogue == "pair" else weight_rows
    return Product(f"{epilogue} {weight_rows}x{inputs}", outputs, inputs, epilogue, chunks)
