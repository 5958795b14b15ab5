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
    """`items` [most, 2] int32 (owner, piece), `total` [1] int32 entries in use, `piece` [1] int32 length of a piece,
    `most` the bound the host knows. `taken` [1] int32 belongs to a launch that deals out entries while it runs, and is
    0 between launches."""

    items: Tensor
    total: Tensor
    piece: Tensor
    most: int
    taken: Tensor


MOST_RUN = 64  # pieces of one run, at most
START_PIECES = 2  # starting and ending a run takes about as long as so many pieces


@triton.jit(do_not_specialize=["owners", "capacity", "piece", "programs", "jobs_each"])
def work_kernel(
    sizes_ptr, items_ptr, total_ptr, piece_ptr, owners, capacity, piece, programs, jobs_each, OWNERS: tl.constexpr,
    MOST_RUN: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Grid (owners). sizes [owners] int32; an owner of size 0 or less has no entry. Entries are runs of 1 to MOST_RUN
    pieces (a power of two), as many as `plain_run` tells."""
    owner = tl.program_id(0)
    index = tl.arange(0, OWNERS)
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < owners, other=0), 0)
    run = 1
    if MOST_RUN > 1:
        all_pieces = (sizes + piece - 1) // piece
        runs = 1 + tl.arange(0, MOST_RUN)
        entries = tl.sum((all_pieces[:, None] + runs[None, :] - 1) // runs[None, :], axis=0)
        cost = (entries * jobs_each + programs - 1) // programs * (runs + START)
        run = tl.min(tl.where(cost == tl.min(cost, axis=0), runs, MOST_RUN), axis=0)
    length = piece * run
    pieces = (sizes + length - 1) // length
    first = tl.sum(tl.where(index < owner, pieces, 0), axis=0)
    mine = tl.sum(tl.where(index == owner, pieces, 0), axis=0)
    if owner == 0:
        tl.store(total_ptr, tl.minimum(tl.sum(pieces, axis=0), capacity))
        tl.store(piece_ptr, length)
    for start in range(0, mine, 128):
        part = start + tl.arange(0, 128)
        at = first + part
        mask = (part < mine) & (at < capacity)
        tl.store(items_ptr + 2 * at, tl.zeros((128,), tl.int32) + owner, mask=mask)
        tl.store(items_ptr + 2 * at + 1, part, mask=mask)


@triton.jit(do_not_specialize=["owners", "capacity", "piece"])
def tiles_kernel(sizes_ptr, starts_ptr, items_ptr, total_ptr, piece_ptr, owners, capacity, piece, OWNERS: tl.constexpr):
    """Grid (owners). As `work_kernel`; the entry of a piece that begins at starts[owner] + part * piece comes behind
    all that begin earlier, and of those that begin together behind those of owners before."""
    owner = tl.program_id(0)
    index = tl.arange(0, OWNERS)
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < owners, other=0), 0)
    starts = tl.load(starts_ptr + index, mask=index < owners, other=0)
    pieces = (sizes + piece - 1) // piece
    mine = tl.sum(tl.where(index == owner, pieces, 0), axis=0)
    start = tl.sum(tl.where(index == owner, starts, 0), axis=0)
    if owner == 0:
        tl.store(total_ptr, tl.minimum(tl.sum(pieces, axis=0), capacity))
        tl.store(piece_ptr, piece)
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
    total, piece, taken = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))
    return WorkList(items, total, piece, capacity, taken)


def fill_work(work: WorkList, sizes: Tensor, piece: int) -> None:
    """Cut `sizes` [owners] int32 in pieces. The caller sees to it that they fit; entries beyond are cut off."""
    _fill(work, sizes, piece, programs=1, jobs_each=1, most_run=1)


def fill_runs(work: WorkList, sizes: Tensor, piece: int, programs: int, jobs_each: int) -> None:
    """As `fill_work` with runs of `plain_run` pieces."""
    _fill(work, sizes, piece, programs, jobs_each, MOST_RUN)


def _fill(work: WorkList, sizes: Tensor, piece: int, programs: int, jobs_each: int, most_run: int) -> None:
    owners = sizes.shape[0]
    work_kernel[(owners,)](
        sizes,
        work.items,
        work.total,
        work.piece,
        owners,
        work.most,
        piece,
        programs,
        jobs_each,
        OWNERS=max(16, next_power(owners)),
        MOST_RUN=most_run,
        START=START_PIECES,
        enable_fp_fusion=True,
        num_warps=4,
    )


def list_tiles(work: WorkList, sizes: Tensor, starts: Tensor, piece: int) -> None:
    """As `fill_work`, in ascending order of where pieces begin: owner o's first at starts[o] [owners] int32."""
    owners = sizes.shape[0]
    tiles_kernel[(owners,)](
        sizes,
        starts,
        work.items,
        work.total,
        work.piece,
        owners,
        work.most,
        piece,
        OWNERS=max(16, next_power(owners)),
        enable_fp_fusion=True,
        num_warps=4,
    )


def plain_tiles(sizes: list[int], starts: list[int], piece: int) -> list[tuple[int, int]]:
    """The host twin of `list_tiles`."""
    return sorted(plain_work(sizes, piece), key=lambda entry: starts[entry[0]] + entry[1] * piece)


def plain_work(sizes: list[int], piece: int) -> list[tuple[int, int]]:
    """The host twin: the entries in use."""
    return [(owner, part) for owner, size in enumerate(sizes) for part in range(-(-max(0, size) // piece))]


def plain_run(sizes: list[int], piece: int, programs: int, jobs_each: int) -> int:
    """Pieces of one run, so that what a program does takes least long: `programs` go round the jobs, `jobs_each` of
    every run, and each job takes its pieces and START_PIECES."""

    def cost(run: int) -> int:
        entries = sum(-(-pieces // run) for pieces in all_pieces)
        return -(-entries * jobs_each // programs) * (run + START_PIECES)

    all_pieces = [-(-max(0, size) // piece) for size in sizes]
    return min(range(1, MOST_RUN + 1), key=cost)
