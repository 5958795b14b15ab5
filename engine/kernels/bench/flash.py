"""FlashAttention libraries beside the kernels here, over one paged pool: for the kernel benchmark and the GPU tests.

Owns which installed libraries this card may use, and how rows of made-up requests become what a library takes. How a
library is called is `engine.flash_attention`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from epicycle.engine.attention_choice import AttentionFacts, choose_attention, installed_libraries
from epicycle.engine.errors import OptionError
from epicycle.engine.flash_attention import FlashParts, FlashRun, layer_view, load_flash, slot_tables
from epicycle.engine.kernels.bench.rows import PAGE_TOKENS, make_pool, prompt_batch
from epicycle.engine.kernels.bench.shapes import Shape
from epicycle.engine.kernels.bench.warm import holds
from epicycle.engine.kernels.graph_times import graphs_us
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention, item_rows
from epicycle.engine.kernels.prompt_attention_triton import QUERY_TILE, prompt_attention

LAYERS = 3  # of the pool, so that tables of different layers differ


def flash_parts(name: str, head_dim: int) -> FlashParts:
    """Library `name` for pages as the engine has them. Raises OptionError where this card or machine can't use it."""
    facts = AttentionFacts(
        capability=torch.cuda.get_device_capability(), dtype="bfloat16", head_dim=head_dim, page_tokens=PAGE_TOKENS,
        page_bytes=0, poison=False, installed=installed_libraries(),
    )  # fmt: skip
    return load_flash(choose_attention(name, facts))


class FlashRows:
    """A pool of random K and V, and rows of one request for each of `spans` (first position, rows). q [N, heads, d]."""

    def __init__(self, shape: Shape, spans: Sequence[tuple[int, int]]) -> None:
        self.shape, self.spans = shape, spans
        self.pool = make_pool(shape, len(spans) * -(-max(map(sum, spans)) // PAGE_TOKENS), LAYERS)
        rows = sum(count for _, count in spans)
        tile = item_rows(rows, shape.heads, self.pool.k.device) if holds(shape) else QUERY_TILE
        self.rows, self.packed = prompt_batch(self.pool, spans, tile)
        self.q = torch.randn(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")

    def run(self, requests: Sequence[int], layer: int) -> FlashRun:
        """Of some requests, as the engine hands it over."""
        counts = [self.spans[at][1] for at in requests]
        planes = torch.zeros(len(requests), dtype=torch.int32, device="cuda")
        slots = torch.tensor(requests, device="cuda")
        return FlashRun(
            layer_view(self.pool.k, layer),
            layer_view(self.pool.v, layer),
            _column([sum(self.spans[at]) for at in requests]),
            slot_tables(slots, planes, self.rows.page_table, self.pool.slots_per_page),
            _column([sum(counts[:at]) for at in range(len(counts) + 1)]),
        )

    def own_prompt(self, layer: int) -> Tensor:
        """All rows by the kernel that serves them here, [N, heads * d]."""
        attend = hopper_prompt_attention if holds(self.shape) else prompt_attention
        return attend(self.q.flatten(1), self.shape.heads, self.rows, self.packed, self.pool.k, self.pool.v, layer)


def time_flash(shape: Shape, spans: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Microseconds of one layer's prompt attention by the kernel here and by every library that may."""
    rows = FlashRows(shape, spans)
    ways: dict[str, list[Callable[[], object]]] = {"here": [partial(rows.own_prompt, at) for at in range(LAYERS)]}
    for name in sorted(installed_libraries()):
        try:
            library = flash_parts(name, shape.head_dim).prompt
        except OptionError as refused:
            print(f"  {refused}")
            continue
        if library is not None:
            runs = [rows.run(range(len(spans)), layer) for layer in range(LAYERS)]
            ways[name] = [partial(library.prompt, rows.q, run) for run in runs]
    found = graphs_us(ways)
    print(f"{shape.name} prompt {list(spans)} " + "  ".join(f"{way}: {took:.1f} us" for way, took in found.items()))
    return found


def _column(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")
