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
from epicycle.engine.kernels.ladder import GemmConfig
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.triton_common import multiplies_in_groups
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places, turning_config
from epicycle.engine.kernels.wide_triton import wide_product

ROWS = (1, 63, 128, 130, 700)
INPUTS = 512
REQUESTS, CONTEXT = 8, 128
"""More tiles than a card has multiprocessors at the most rows, and some that are cut in two."""


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
    try:
        return config if _is_equal(config, heads, kv_heads, width, page_tokens, dtype, device) else None
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return None


def _is_equal(
    config: GemmConfig,
    heads: int,
    kv_heads: int,
    width: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    generator = torch.Generator(device).manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    weight = normal((heads + 2 * kv_heads) * width, INPUTS)
    angles = torch.rand(2, CONTEXT, width, device=device, generator=generator).to(dtype)
    turning = Turning(angles[0], angles[1], False)
    for count in ROWS:
        x, rows = normal(count, INPUTS), addresses(count, page_tokens, generator, device)
        size = 3 * rows.page_table.numel(), page_tokens, kv_heads, width
        pools = [torch.full(size, 7.0, dtype=dtype, device=device) for _ in range(4)]
        q, turned = (torch.full((count, heads * width), 7.0, dtype=dtype, device=device) for _ in range(2))
        qkv = product(x, weight, GemmConfig("stream", 16, 32, 128, 4, 3))
        rope_kv(qkv, heads, turning, rows, pools[0], pools[1], 1, out=q)
        to = TurnedRows(turned, pools[2], pools[3], find_places(rows, turning, page_tokens), 1)
        wide_product(x, weight, config, "turned", 1, None, to)
        if not all(torch.equal(*pair) for pair in ((q, turned), (pools[0], pools[2]), (pools[1], pools[3]))):
            return False
    return True


def addresses(count: int, page_tokens: int, generator: torch.Generator, device: torch.device) -> RowAddresses:
    """Rows of several requests on two planes of pages with three slots, some of them padding."""

    def shuffled(most: int) -> Tensor:
        return torch.randperm(most, device=device, generator=generator).to(torch.int32)

    pages = -(-CONTEXT // page_tokens)
    cells = shuffled(REQUESTS * CONTEXT)[:count]
    slots, positions = cells // CONTEXT, cells % CONTEXT
    padding = (torch.arange(count, device=device) % 10) == 9
    table = shuffled(REQUESTS * pages).view(REQUESTS, pages)
    return RowAddresses(torch.where(padding, -1, slots), positions, cells % 2, table, 3)
