# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The work list of prompt attention: chunks of different lengths cut into items of one number of rows.

Owns the list and its order. It is made once per traversal, serves every layer, and lets a launch have a fixed grid
whatever the lengths are. It must not know what is done with an item.
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
    """`items` [most, 2] int32 (owner, piece), `total` [1] int32 entries in use, `most` the bound the host knows.
    `taken` [1] int32 belongs to a launch that deals out entries while it runs, and is 0 between launches: each sets it
    back for the next one of this list, and a new list does so whatever the last one's launches have left."""

    items: Tensor
    total: Tensor
    most: int
    taken: Tensor


@triton.jit(do_not_specialize=["owners", "capacity", "piece"])
def tiles_kernel(
    sizes_ptr, starts_ptr, items_ptr, total_ptr, taken_ptr, owners, capacity, piece, OWNERS: tl.constexpr
):  # fmt: skip
    """Grid (owners). An owner of size 0 or less has no entry. That of a piece which begins at
    starts[owner] + part * piece comes behind all that begin earlier, and of those that begin together behind those of
    owners before."""
    owner = tl.program_id(0)
    index = tl.arange(0, OWNERS)
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < owners, other=0), 0)
    starts = tl.load(starts_ptr + index, mask=index < owners, other=0)
    pieces = (sizes + piece - 1) // piece
    mine = tl.sum(tl.where(index == owner, pieces, 0), axis=0)
    start = tl.sum(tl.where(index == owner, starts, 0), axis=0)
    if owner == 0:
        tl.store(total_ptr, tl.minimum(tl.sum(pieces, axis=0), capacity))
        tl.store(taken_ptr, 0)
    for first in range(0, mine, 64):
        part = first + tl.arange(0, 64)
        past = (start + part * piece)[:, None] - starts[None, :]
        earlier = tl.where((index < owner)[None, :], past // piece + 1, (past + piece - 1) // piece)
        earlier = tl.where(past >= 0, tl.minimum(earlier, pieces[None, :]), 0)
        at = tl.sum(earlier, axis=1)
        mask = (part < mine) & (at < capacity)
        tl.store(items_ptr + 2 * at, tl.zeros((64,), tl.int32) + owner, mask=mask)
        tl.store(items_ptr + 2 * at + 1, part, mask=mask)


def allocate_work(capacity: int, device: torch.device) -> WorkList:
    """A list that may be filled again and again."""
    items = torch.zeros(capacity, 2, dtype=torch.int32, device=device)
    total, taken = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    return WorkList(items, total, capacity, taken)


def list_tiles(work: WorkList, sizes: Tensor, starts: Tensor, piece: int) -> None:
    """Cut `sizes` [owners] int32 in pieces, in ascending order of where they begin: owner o's first at starts[o]
    [owners] int32. The caller sees to it that they fit; entries beyond are cut off."""
    owners = sizes.shape[0]
    tiles_kernel[(owners,)](
        sizes,
        starts,
        work.items,
        work.total,
        work.taken,
        owners,
        work.most,
        piece,
        OWNERS=max(16, next_power(owners)),
        enable_fp_fusion=True,
        num_warps=4,
    )


def plain_tiles(sizes: list[int], starts: list[int], piece: int) -> list[tuple[int, int]]:
    """The host twin of `list_tiles`."""
    entries = [(owner, part) for owner, size in enumerate(sizes) for part in range(-(-max(0, size) // piece))]
    return sorted(entries, key=lambda entry: starts[entry[0]] + entry[1] * piece)
