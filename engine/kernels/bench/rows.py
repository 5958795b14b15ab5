"""Rows over a paged pool for the kernel benchmark: decode batches, prompt chunks, and their work lists.

Owns made-up page tables and lengths; pages are dealt out in shuffled order, as after a long run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.bench.shapes import Shape
from epicycle.engine.kernels.decode_attention_triton import PIECE, DecodeScratch, allocate_scratch, list_runs
from epicycle.engine.kernels.prompt_attention_triton import PromptChunks
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning
from epicycle.engine.kernels.runs_triton import Runs, allocate_runs
from epicycle.engine.kernels.spans import pack_spans, span_columns

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Pool:
    k: Tensor
    v: Tensor
    slots_per_page: int
    pages: int


def make_pool(shape: Shape, pages: int, slots_per_page: int) -> Pool:
    """Random K and V."""
    size = (pages * slots_per_page, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    k, v = (torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    return Pool(k, v, slots_per_page, pages)


def make_rows(pool: Pool, slots: Tensor, positions: Tensor, windows: int, context: int) -> RowAddresses:
    """Rows [N] of `windows` requests of `context` tokens each. Requests that don't all fit share pages."""
    per = -(-context // PAGE_TOKENS)
    shuffled = torch.randperm(pool.pages, device="cuda", dtype=torch.int32)
    table = shuffled.repeat(-(-windows * per // pool.pages))[: windows * per].view(windows, per).contiguous()
    return RowAddresses(slots, positions, torch.zeros_like(slots), table, pool.slots_per_page)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    rows: RowAddresses
    work: Runs
    scratch: DecodeScratch


def decode_batch(shape: Shape, pool: Pool, lengths: Sequence[int], run: int) -> DecodeBatch:
    """One row for each request of `lengths` tokens (the row's own included), in runs of so many tokens; 0 for what
    suits."""
    count = len(lengths)
    slots, positions = span_columns([(length - 1, 1) for length in lengths], torch.device("cuda"))
    rows = make_rows(pool, slots, positions, count, max(lengths))
    entries = sum(-(-length // PIECE) for length in lengths)
    work, sizes = allocate_runs(entries, torch.device("cuda")), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    list_runs(work, sizes, shape.kv_heads, shape.head_dim, length=run // PIECE)
    scratch = allocate_scratch(entries, count, shape.heads, shape.kv_heads, shape.head_dim, torch.device("cuda"))
    return DecodeBatch(rows, work, scratch)


def prompt_batch(pool: Pool, chunks: Sequence[tuple[int, int]], query_tile: int) -> tuple[RowAddresses, PromptChunks]:
    """Chunks of (first position, rows), one request each."""
    slots, positions = span_columns(chunks, torch.device("cuda"))
    context = max(first + count for first, count in chunks)
    rows = make_rows(pool, slots, positions, len(chunks), context)
    return rows, pack_spans(chunks, query_tile, torch.device("cuda"))[0]


def make_turning(shape: Shape, context: int) -> Turning:
    """Random angles will do: time doesn't depend on them, and the twins get the same tables."""
    width = shape.head_dim // 2 if shape.pairs else shape.head_dim
    angles = torch.rand(context, width, device="cuda") * 6.28
    dtype = torch.float32 if shape.pairs else torch.bfloat16
    bias = torch.randn(2, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda") if shape.pairs else None
    return Turning(angles.cos().to(dtype), angles.sin().to(dtype), shape.pairs, bias)
