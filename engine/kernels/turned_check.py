"""Whether a QKV product that turns and writes its rows gives the bits of the launches it replaces, on this card.

Owns one comparison, made once for a shape: rows of padding, planes and positions anywhere, pages in any order, and
cells that nobody may touch. Where a bit differs, or the kernel is refused, the twins serve. It must not know pools or
ticks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from epicycle.engine.kernels.gemm_triton import product
from epicycle.engine.kernels.ladder import GemmConfig, sure
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.triton_common import multiplies_in_groups
from epicycle.engine.kernels.triton_ops import kind_of
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places, turning_config
from epicycle.engine.kernels.wide_triton import wide_product

ROWS = (1, 63, 128, 130, 700)
INPUTS = 512
REQUESTS = 8


@cache
def turned_config(
    heads: int, kv_heads: int, width: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> GemmConfig | None:
    """How a QKV product runs where it may turn its rows, split-half and without a bias; None where it may not. Uses
    some tens of MiB and waits for the device."""
    config = turning_config(width)
    # Tiles are two heads; no tile may be partly q or k.
    if config is None or heads % 2 or kv_heads % 2 or not multiplies_in_groups(device):
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    shape = heads, kv_heads, width, page_tokens
    try:
        return config if all(is_equal(config, shape, INPUTS, count, dtype, device) for count in ROWS) else None
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return None


def is_equal(
    config: GemmConfig,
    shape: tuple[int, int, int, int],
    inputs: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether q, pages and all else are those of the sure product and `rope_kv`, for so many rows of a `shape`: heads,
    kv_heads, width and page_tokens."""
    heads, kv_heads, width, page_tokens = shape
    generator = torch.Generator(device).manual_seed(count)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator).to(dtype)

    def untouched(*size: int) -> Tensor:
        return torch.full(size, 7.0, dtype=dtype, device=device)

    context = 2 * -(-count // REQUESTS)
    rows = _addresses(count, context, page_tokens, generator, device)
    angles = torch.rand(2, context, width, device=device, generator=generator).to(dtype)
    turning = Turning(angles[0], angles[1], False)
    x, weight = normal(count, inputs), normal((heads + 2 * kv_heads) * width, inputs)
    found = []
    for is_turned in (False, True):
        pool = 3 * rows.page_table.numel(), page_tokens, kv_heads, width
        q, k, v = untouched(count, heads * width), untouched(*pool), untouched(*pool)
        if is_turned:
            to = TurnedRows(q, k, v, find_places(rows, turning, page_tokens), 1)
            wide_product(x, weight, config, "turned", 1, None, to)
        else:
            rope_kv(product(x, weight, sure(kind_of(weight))), heads, turning, rows, k, v, 1, out=q)
        found.append((q, k, v))
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _addresses(
    count: int, context: int, page_tokens: int, generator: torch.Generator, device: torch.device
) -> RowAddresses:
    """Rows of several requests on two planes of pages with three slots, some of them padding."""

    def shuffled(most: int) -> Tensor:
        return torch.randperm(most, device=device, generator=generator).to(torch.int32)

    pages = -(-context // page_tokens)
    taken = shuffled(REQUESTS * context)[:count]
    padding = torch.arange(count, device=device) % 10 == 9
    table = shuffled(REQUESTS * pages).view(REQUESTS, pages)
    return RowAddresses(torch.where(padding, -1, taken // context), taken % context, taken % 2, table, 3)
