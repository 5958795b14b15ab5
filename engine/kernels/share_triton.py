# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which multiprocessors attend to prompts and which to decode rows, where a tick has both.

Owns the division and the kernel that makes it, on the device and once per traversal, from the lengths of all rows.
Prompts keep matrix units busy and decode rows the memory, but neither kernel leaves registers for the other on one
multiprocessor. Side by side, each on its own, both are done sooner than one after the other, if they are done together.
Bits don't depend on it. It must not know what either kernel computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import next_power

# What a multiprocessor does in one and the same time, in positions of one head: a piece of 128 that a decode row reads,
# or a tile of 128 that 128 prompt rows see. To start a row, or an item of prompt rows, takes as long as so many more.
# Fitted to heads of 128 on an H200; docs/benchmarks/kernels.md has the times.
ROW_START = 64
ITEM_START = 512


@triton.jit(do_not_specialize=["rows", "chunks"])
def share_kernel(
    share_ptr, sizes_ptr, starts_ptr, counts_ptr, rows, chunks, item_rows, heads, kv_heads, all_of_them,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, ROW_START: tl.constexpr, ITEM_START: tl.constexpr,
):  # fmt: skip
    """Grid (1). share [2] int32: multiprocessors of prompts, of decode rows. As `plain_share`."""
    row, chunk = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    sizes = tl.load(sizes_ptr + row, mask=row < rows, other=0)
    counts = tl.load(counts_ptr + chunk, mask=chunk < chunks, other=0)
    starts = tl.load(starts_ptr + chunk, mask=chunk < chunks, other=0)
    decode = kv_heads * tl.sum(tl.where(sizes > 0, sizes + ROW_START, 0).to(tl.float32), axis=0)
    items = (counts + item_rows - 1) // item_rows
    seen = starts.to(tl.float32) + 0.5 * (counts + item_rows).to(tl.float32) + ITEM_START
    prompt = heads * tl.sum(items.to(tl.float32) * seen, axis=0)
    share = all_of_them * prompt / tl.maximum(prompt + decode, 1.0)
    most = tl.minimum(heads * tl.sum(items, axis=0), all_of_them - 1)
    share = tl.maximum(tl.minimum((share + 0.5).to(tl.int32), most), 1)
    tl.store(share_ptr, share)
    tl.store(share_ptr + 1, all_of_them - share)


def share_out(
    sizes: Tensor, starts: Tensor, counts: Tensor, item_rows: int, heads: int, kv_heads: int, all_of_them: int
) -> Tensor:
    """[2] int32: how many of `all_of_them` prompts get, and how many decode rows.

    `sizes` [N] int32 positions of decode rows, 0 where there is none; `starts` and `counts` [C] int32 first position
    and rows of chunks, 0 rows for none; so many rows are one program's item.
    """
    share = torch.empty(2, dtype=torch.int32, device=sizes.device)
    rows, chunks = len(sizes), len(counts)
    share_kernel[(1,)](
        share, sizes, starts, counts, rows, chunks, item_rows, heads, kv_heads, all_of_them,
        ROWS=max(16, next_power(rows)), CHUNKS=max(16, next_power(chunks)),
        ROW_START=ROW_START, ITEM_START=ITEM_START, num_warps=4,
    )  # fmt: skip
    return share


def plain_share(
    sizes: list[int], spans: list[tuple[int, int]], item_rows: int, heads: int, kv_heads: int, all_of_them: int
) -> tuple[int, int]:
    """The host twin; `spans` are (first position, rows) of chunks."""
    decode = kv_heads * sum(size + ROW_START for size in sizes if size > 0)
    items = [-(-count // item_rows) for _, count in spans]
    seen = [start + (count + item_rows) / 2 + ITEM_START for start, count in spans]
    prompt = heads * sum(number * each for number, each in zip(items, seen, strict=True))
    share = all_of_them * prompt / max(prompt + decode, 1)
    of_prompts = max(1, min(int(share + 0.5), heads * sum(items), all_of_them - 1))
    return of_prompts, all_of_them - of_prompts
