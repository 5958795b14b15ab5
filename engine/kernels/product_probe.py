"""The start-up self-check of matrix products on a GPU: bits of every row, and times.

Owns the `ladder.Probe` that runs on torch and Triton: fixed random inputs, a weight of each product's shape in more
copies than a cache holds, CUDA graphs for times. Sums cancel: what is left of them is rounding error, which shows every
difference in order, where the rounded sum of random numbers hides all but one in thousands. It is made for
`ladder.choose` and let go afterwards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from epicycle.engine.kernels.candidates import EARLY_KERNELS, sure
from epicycle.engine.kernels.gemm_triton import added_parts, run_product
from epicycle.engine.kernels.graph_times import copies_of, graph_us
from epicycle.engine.kernels.ladder import Choices, choose
from epicycle.engine.kernels.products import EXACT, GemmConfig, Product
from epicycle.engine.kernels.triton_common import starts_early

REPLAYS = 5


class ProductProbe:
    """Meets `ladder.Probe` on `device`."""

    def __init__(self, most_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._most_rows = most_rows
        self._dtype = dtype
        self._device = device
        self._held: tuple[str, Tensor, list[Tensor], Tensor] | None = None  # of the product at hand

    def is_equal(self, product: Product, config: GemmConfig, rows: int) -> bool:
        x, weights, expected = self._of(product)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(self._device)
        straight = self._whole(run_product(product, x[:rows], weights[0], config))
        shuffled = self._whole(run_product(product, x[:rows][order], weights[0], config))
        return torch.equal(straight, expected[:rows]) and torch.equal(shuffled, expected[:rows][order])

    def time_us(self, product: Product, config: GemmConfig, rows: int) -> float:
        if config.kernel in EARLY_KERNELS and not starts_early(self._device):
            return float("inf")
        x, weights, _ = self._of(product)
        try:
            return graph_us([partial(run_product, product, x[:rows], weight, config) for weight in weights], REPLAYS)
        except Exception:
            if config == sure(product):
                raise  # it ran a moment ago: what fails is the timing, and nothing would be chosen by its speed
            return float("inf")  # this card or this Triton refuses it: whatever the reason, it isn't chosen

    def _of(self, product: Product) -> tuple[Tensor, list[Tensor], Tensor]:
        """Inputs, weights and the sure bits of every row; made when a product first comes up."""
        if self._held is None or self._held[0] != product.name:
            self._held = None
            generator = torch.Generator(self._device).manual_seed(product.inputs)
            x, first = cancelling(product, self._most_rows, self._dtype, self._device, generator)
            weights = cold_copies(first)
            expected = self._whole(run_product(product, x, first, sure(product)))
            self._held = product.name, x, weights, expected
        return self._held[1:]

    def _whole(self, y: Tensor) -> Tensor:
        return added_parts(y, self._dtype) if y.ndim == 3 else y


def cold_copies(weight: Tensor) -> list[Tensor]:
    """`weight` and as many copies as it takes for none to be in a cache when its turn comes again."""
    copies = copies_of(weight.numel() * weight.element_size())
    return [weight, *(weight.clone() for _ in range(copies - 1))]


def cancelling(
    product: Product, rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random x [rows, K] and weight [O, K] of which every sum's second half takes the first away, in another order."""
    half = product.inputs // 2
    order = torch.randperm(half, device=device, generator=generator)
    x = torch.zeros(rows, product.inputs, dtype=dtype, device=device)
    weight = torch.zeros(product.weight_rows, product.inputs, dtype=dtype, device=device)
    for held, scale, sign in ((x, 1.0, 1), (weight, product.inputs**-0.5, -1)):
        held[:, :half].normal_(0.0, scale, generator=generator)
        held[:, half : 2 * half] = sign * held[:, :half][:, order]
    return x, weight


def check_products(
    products: list[Product],
    steps: list[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps_bits: bool = True,
) -> Choices:
    """Time and compare every implementation of `products` on `steps` of the ladder; seconds, once at start-up."""
    return choose(products, steps, ProductProbe(max(steps), dtype, device), keeps_bits=keeps_bits)


def rows_that_agree(product: Product, rows: list[int], dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Those of `rows` at which the library, handed just so many, gives every row its sure bits."""
    probe = ProductProbe(max(rows), dtype, device)
    return frozenset(count for count in rows if probe.is_equal(product, EXACT, count))
