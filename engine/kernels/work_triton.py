# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Work lists on the device: owners with different amounts of work cut into pieces of one size.

Owns the list that attention kernels walk: entry w is (owner, piece), an owner's pieces in a row and in order. It is
made once per traversal, serves every layer, and lets a launch have a fixed grid whatever the lengths are. It must not
know what a piece is: KV positions of a decode row, or query rows of a prompt chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import next_power


@dataclass(frozen=True, slots=True)
class WorkList:
    """`items` [most, 2] int32 (owner, piece), `total` [1] int32 entries in use, `most` the bound the host knows."""

    items: Tensor
    total: Tensor
    most: int


@triton.jit(do_not_specialize=["owners", "capacity"])
def work_kernel(sizes_ptr, items_ptr, total_ptr, owners, capacity, PIECE: tl.constexpr, OWNERS: tl.constexpr):
    """Grid (owners). sizes [owners] int32; an owner of size 0 or less has no entry."""
    owner = tl.program_id(0)
    index = tl.arange(0, OWNERS)
    pieces = (tl.maximum(tl.load(sizes_ptr + index, mask=index < owners, other=0), 0) + PIECE - 1) // PIECE
    first = tl.sum(tl.where(index < owner, pieces, 0), axis=0)
    mine = tl.sum(tl.where(index == owner, pieces, 0), axis=0)
    if owner == 0:
        tl.store(total_ptr, tl.minimum(tl.sum(pieces, axis=0), capacity))
    for start in range(0, mine, 128):
        piece = start + tl.arange(0, 128)
        at = first + piece
        mask = (piece < mine) & (at < capacity)
        tl.store(items_ptr + 2 * at, tl.zeros((128,), tl.int32) + owner, mask=mask)
        tl.store(items_ptr + 2 * at + 1, piece, mask=mask)


def allocate_work(capacity: int, device: torch.device) -> WorkList:
    """A list that `fill_work` may fill again and again."""
    items = torch.zeros(capacity, 2, dtype=torch.int32, device=device)
    return WorkList(items, torch.zeros(1, dtype=torch.int32, device=device), capacity)


def fill_work(work: WorkList, sizes: Tensor, piece: int) -> None:
    """Cut `sizes` [owners] int32 in pieces. The caller sees to it that they fit; entries beyond are cut off."""
    owners = sizes.shape[0]
    work_kernel[(owners,)](
        sizes,
        work.items,
        work.total,
        owners,
        work.most,
        PIECE=piece,
        OWNERS=max(16, next_power(owners)),
        enable_fp_fusion=True,
        num_warps=4,
    )


def plain_work(sizes: list[int], piece: int) -> list[tuple[int, int]]:
    """The host twin: the entries in use."""
    return [(owner, part) for owner, size in enumerate(sizes) for part in range(-(-max(0, size) // piece))]
