"""How a QKV product of many rows turns and writes them: by itself or apart, by bits and times on this card.

Owns one comparison and one choice, made once for a shape and a number of rows. Compared are q and whole pools: rows of
padding, planes, positions and pages anywhere, cells that nobody may touch. Where a bit differs, or the kernel is
refused or no faster, the launches it would replace serve. It must not know pools or ticks.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache, partial

import torch
from torch import Tensor

from epicycle.engine.kernels.candidates import TURNED, can_turn, sure
from epicycle.engine.kernels.gemm_triton import run_product
from epicycle.engine.kernels.graph_times import graph_us
from epicycle.engine.kernels.product_probe import REPLAYS, cancelling, cold_copies
from epicycle.engine.kernels.products import GemmConfig, Product
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places
from epicycle.engine.kernels.wide_triton import turn_product

PAGE_TOKENS = 16
REQUESTS = 8
LEAST_ROWS = 512
ROWS = (1, 63, 128, 130)
"""What is compared beside the number of rows at hand: tiles that are hardly filled, tiles that are cut."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Of q, of k and v, and how wide they are."""

    heads: int
    kv_heads: int
    width: int


@cache
def turned_config(
    qkv: Product, apart: GemmConfig, heads: Heads, rows: int, dtype: torch.dtype, device: torch.device
) -> GemmConfig | None:
    """How the product runs where it turns so many rows itself, split-half and without a bias; None where it runs as
    `apart`, with a launch behind it. Uses some hundred MiB and waits for the device."""
    fit = [config for config in TURNED if rows >= LEAST_ROWS and can_turn(config, qkv, *astuple(heads))]
    timed = [(time_us(config, qkv, heads, rows, dtype, device), config.key, config) for config in fit]
    limit = time_us(apart, qkv, heads, rows, dtype, device) if timed else 0.0
    for took_us, _, config in sorted(timed):
        if took_us < limit and all(is_equal(config, qkv, heads, n, dtype, device) for n in (*ROWS, rows)):
            return config
    return None


def time_us(
    config: GemmConfig, qkv: Product, heads: Heads, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Median time of product, rotation and KV write with weights that no cache holds; infinity where it's refused."""
    try:
        case = _Case(qkv, heads, rows, dtype, device)
        return graph_us([partial(case.run, config, weight) for weight in cold_copies(case.weight)], REPLAYS)
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't chosen
        return float("inf")


def is_equal(
    config: GemmConfig, qkv: Product, heads: Heads, rows: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether q, pages and all else are those of the sure product and `rope_kv`."""
    found = []
    for one in (sure(qkv), config):
        case = _Case(qkv, heads, rows, dtype, device)
        case.run(one, case.weight)
        found.append((case.q, case.k, case.v))
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


class _Case:
    """So many rows with their angles, places and pools; the same ones every time."""

    def __init__(self, qkv: Product, heads: Heads, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(rows)
        self.qkv, self.heads = qkv, heads
        self.x, self.weight = cancelling(qkv, rows, dtype, device, generator)
        context = 2 * -(-rows // REQUESTS)
        self.rows = _addresses(rows, context, generator, device)
        angles = torch.rand(2, context, heads.width, device=device, generator=generator).to(dtype)
        self.turning = Turning(angles[0], angles[1], False)
        self.places = find_places(self.rows, self.turning, PAGE_TOKENS)
        size = 3 * self.rows.page_table.numel(), PAGE_TOKENS, heads.kv_heads, heads.width
        self.k, self.v = (torch.full(size, 7.0, dtype=dtype, device=device) for _ in range(2))
        self.q = torch.full((rows, heads.heads * heads.width), 7.0, dtype=dtype, device=device)

    def run(self, config: GemmConfig, weight: Tensor) -> Tensor:
        if config.kernel == "turned":
            return turn_product(self.x, weight, config, TurnedRows(self.q, self.k, self.v, self.places, 1))
        product = run_product(self.qkv, self.x, weight, config)
        return rope_kv(product, self.heads.heads, self.turning, self.rows, self.k, self.v, 1, out=self.q)


def _addresses(rows: int, context: int, generator: torch.Generator, device: torch.device) -> RowAddresses:
    """Rows of several requests on two planes of pages with three slots, some of them padding."""

    def shuffled(most: int) -> Tensor:
        return torch.randperm(most, device=device, generator=generator).to(torch.int32)

    pages = -(-context // PAGE_TOKENS)
    taken = shuffled(REQUESTS * context)[:rows]
    padding = torch.arange(rows, device=device) % 10 == 9
    table = shuffled(REQUESTS * pages).view(REQUESTS, pages)
    return RowAddresses(torch.where(padding, -1, taken // context), taken % context, taken % 2, table, 3)
