"""Rows whose requests and lengths the host knows, as kernels take them: for start-up checks, benchmarks and tests.

Owns how spans (first position, rows) become columns and packed chunks, and what is drawn to fill them; span i belongs
to slot i. Ticks make the same on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from epicycle.engine.kernels.prompt_attention_triton import PromptChunks
from epicycle.engine.kernels.work_triton import allocate_work, list_tiles

Spans = Sequence[tuple[int, int]]


def normals(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Draws tensors of the shapes that it is called with, on the generator's device."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=generator.device, generator=generator).to(dtype)

    return draw


def span_columns(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """Slots and positions [N] int32 of the rows of all spans, one span behind the other."""
    slots = [slot for slot, (_, count) in enumerate(spans) for _ in range(count)]
    positions = [first + offset for first, count in spans for offset in range(count)]
    columns = torch.tensor([slots, positions], dtype=torch.int32, device=device)
    return columns[0], columns[1]


def pack_spans(spans: Spans, item_rows: int, device: torch.device) -> tuple[PromptChunks, Tensor]:
    """Spans as chunks in items of so many rows, and their first positions [C] int32."""
    starts, counts = torch.tensor(spans, dtype=torch.int32, device=device).unbind(1)
    starts, counts = starts.contiguous(), counts.contiguous()
    work = allocate_work(sum(-(-count // item_rows) for _, count in spans), device)
    list_tiles(work, counts, starts, item_rows)
    return PromptChunks((torch.cumsum(counts, 0) - counts).to(torch.int32), counts, work, item_rows), starts
