"""The start-up self-check of matrix products on a GPU: bits of every row, and times.

Owns the `ladder.Probe` that runs on torch and Triton: fixed random inputs, a weight of each product's shape in more
copies than a cache holds, CUDA graphs for times. It is made for `ladder.choose` and let go afterwards.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from torch import Tensor

from epicycle.engine.kernels.gemm_triton import added_parts, run_product
from epicycle.engine.kernels.ladder import EXACT, Choices, GemmConfig, Product, choose, sure
from epicycle.engine.kernels.triton_common import starts_early

COLD_BYTES = 200 << 20
REPLAYS = 5


class ProductProbe:
    """Meets `ladder.Probe` on `device`. Weights of the model itself may be handed in by product name."""

    def __init__(self, most_rows: int, dtype: torch.dtype, device: torch.device, weights: dict[str, Tensor]) -> None:
        self._most_rows = most_rows
        self._dtype = dtype
        self._device = device
        self._given = weights
        self._held: tuple[str, Tensor, list[Tensor], Tensor] | None = None  # of the product at hand

    def is_equal(self, product: Product, config: GemmConfig, rows: int) -> bool:
        x, weights, expected = self._of(product)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(self._device)
        straight = self._whole(run_product(product, x[:rows], weights[0], config))
        shuffled = self._whole(run_product(product, x[:rows][order], weights[0], config))
        return torch.equal(straight, expected[:rows]) and torch.equal(shuffled, expected[:rows][order])

    def time_us(self, product: Product, config: GemmConfig, rows: int) -> float:
        if config.kernel == "early" and not starts_early(self._device):
            return float("inf")
        x, weights, _ = self._of(product)
        try:
            return _graph_us([partial(run_product, product, x[:rows], weight, config) for weight in weights])
        except Exception:
            return float("inf")  # this card or this Triton refuses it: whatever the reason, it isn't chosen

    def _of(self, product: Product) -> tuple[Tensor, list[Tensor], Tensor]:
        """Inputs, weights and the sure bits of every row; made when a product first comes up."""
        if self._held is None or self._held[0] != product.name:
            self._held = None
            generator = torch.Generator(self._device).manual_seed(product.inputs)
            shape = (self._most_rows, product.inputs)
            x = torch.randn(shape, dtype=torch.float32, device=self._device, generator=generator).to(self._dtype)
            weights = self._weights(product, generator)
            expected = self._whole(run_product(product, x, weights[0], sure(product)))
            self._held = product.name, x, weights, expected
        return self._held[1:]

    def _weights(self, product: Product, generator: torch.Generator) -> list[Tensor]:
        first = self._given.get(product.name)
        if first is None:
            first = torch.empty(product.weight_rows, product.inputs, dtype=self._dtype, device=self._device)
            first.normal_(0.0, product.inputs**-0.5, generator=generator)
        copies = min(32, COLD_BYTES // (first.numel() * first.element_size()) + 1)
        return [first, *(first.clone() for _ in range(max(1, copies)))]

    def _whole(self, y: Tensor) -> Tensor:
        return added_parts(y, self._dtype) if y.ndim == 3 else y


def check_products(
    products: list[Product],
    steps: list[int],
    dtype: torch.dtype,
    device: torch.device,
    weights: dict[str, Tensor] | None = None,
    *,
    keeps_bits: bool = True,
) -> Choices:
    """Time and compare every implementation of `products` on `steps` of the ladder; seconds, once at start-up."""
    return choose(products, steps, ProductProbe(max(steps), dtype, device, weights or {}), keeps_bits=keeps_bits)


def rows_that_agree(product: Product, rows: list[int], dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Those of `rows` at which the library, handed just so many, gives every row its sure bits."""
    probe = ProductProbe(max(rows), dtype, device, {})
    return frozenset(count for count in rows if probe.is_equal(product, EXACT, count))


def _graph_us(launches: list[partial[Tensor]]) -> float:
    launches[0]()  # compiles, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000 / len(launches))
    return statistics.median(times)
