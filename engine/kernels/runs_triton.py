# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The work list of decode attention: which program reads which pieces of which row.

Owns the cut, made on the device and once per traversal from the rows' lengths. A row's history is summed in pieces of
fixed length; a run is some of them one after the other, read in one stream. Two cuts are weighed against each other.
Runs of one length go round the programs: nothing is cut that needn't be, but a last round may be nearly empty. Or all
rows' pieces stand in one line that groups of programs, one for each KV head, share evenly: nobody waits, but rows are
cut where shares end. Bits don't depend on either. It must not know what a piece holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import next_power

MOST_RUN = 64  # pieces of a run, where all are of one length
MOST_GROUPS = 64
START_PIECES = 2  # starting and ending a run takes about as long as so many pieces
COLUMNS = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class Runs:
    """`items` [most, 5] int32: row, first piece, pieces (0: nothing to do), place and how many runs its row has. The
    pieces of all rows have places of their own, a row's one after the other. `total` [1] int32 entries in use,
    `programs` [1] int32: how many go round the jobs (entry, KV head), entry by entry."""

    items: Tensor
    total: Tensor
    programs: Tensor

    @property
    def most(self) -> int:
        """The bound the host knows."""
        return len(self.items)


@triton.jit
def _runs_between(low, high, begins, ends):
    """How many rows have pieces between each `low` and `high` of the line."""
    reaches = (begins[None, :] < high[:, None]) & (ends[None, :] > low[:, None]) & (ends > begins)[None, :]
    return tl.sum(reaches.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["rows", "capacity", "piece", "programs", "heads", "length"])
def runs_kernel(
    sizes_ptr, items_ptr, total_ptr, programs_ptr, share_ptr, rows, capacity, piece, programs, heads, length,
    ROWS: tl.constexpr, MOST_RUN: tl.constexpr, MOST_GROUPS: tl.constexpr, START: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (rows). As `plain_runs`, of sizes [rows] int32; with SHARED `programs` are those of each of share[1]
    multiprocessors."""
    mine = tl.program_id(0)
    index = tl.arange(0, ROWS)
    sizes = tl.maximum(tl.load(sizes_ptr + index, mask=index < rows, other=0), 0)
    pieces = (sizes + piece - 1) // piece
    ends = tl.cumsum(pieces, axis=0)
    begins = ends - pieces
    line = tl.sum(pieces, axis=0)
    first = tl.sum(tl.where(index == mine, begins, 0), axis=0)
    own = tl.sum(tl.where(index == mine, pieces, 0), axis=0)
    if SHARED:
        programs *= tl.load(share_ptr + 1)
    programs = tl.minimum(programs, capacity * heads)

    lengths = 1 + tl.arange(0, MOST_RUN)
    entries = tl.sum((pieces[:, None] + lengths[None, :] - 1) // lengths[None, :], axis=0)
    cost = (entries * heads + programs - 1) // programs * (lengths + START)
    least = tl.min(cost, axis=0)
    run = tl.min(tl.where(cost == least, lengths, MOST_RUN), axis=0)

    groups = tl.minimum(programs // heads, MOST_GROUPS)
    share = tl.maximum((line + groups - 1) // tl.maximum(groups, 1), 1)
    group = tl.arange(0, MOST_GROUPS)
    low, high = group * share, tl.minimum((group + 1) * share, line)
    held = _runs_between(low, high, begins, ends)
    shared_cost = tl.max(tl.where(high > low, high - low + START * held, 0), axis=0)

    if length > 0:
        run = length
    if (length > 0) | (groups == 0) | (least <= shared_cost):
        begin = tl.sum(tl.where(index < mine, (pieces + run - 1) // run, 0), axis=0)
        runs = (own + run - 1) // run
        if mine == 0:
            tl.store(total_ptr, tl.minimum(tl.sum((pieces + run - 1) // run, axis=0), capacity))
            tl.store(programs_ptr, programs)
        for start in range(0, runs, 64):
            part = start + tl.arange(0, 64)
            at = items_ptr + COLUMNS * (begin + part)
            mask = (part < runs) & (begin + part < capacity)
            tl.store(at, tl.zeros((64,), tl.int32) + mine, mask=mask)
            tl.store(at + 1, part * run, mask=mask)
            tl.store(at + 2, tl.minimum(own - part * run, run), mask=mask)
            tl.store(at + 3, first + part * run, mask=mask)
            tl.store(at + 4, tl.zeros((64,), tl.int32) + runs, mask=mask)
    else:
        total = groups * tl.max(held, axis=0)
        if mine == 0:
            tl.store(total_ptr, tl.minimum(total, capacity))
            tl.store(programs_ptr, groups * heads)
        # Rows before this one that share its first group with it come before it there, and none in its others.
        begin = first // share
        before = tl.sum(((index < mine) & (pieces > 0) & (ends > begin * share)).to(tl.int32), axis=0)
        runs = tl.where(own > 0, (first + own - 1) // share - begin + 1, 0)
        for start in range(0, runs, 64):
            part = start + tl.arange(0, 64)
            entry = begin + part + tl.where(part == 0, before * groups, 0)
            at = items_ptr + COLUMNS * entry
            mask = (part < runs) & (entry < capacity)
            lowest = tl.maximum((begin + part) * share, first)
            tl.store(at, tl.zeros((64,), tl.int32) + mine, mask=mask)
            tl.store(at + 1, lowest - first, mask=mask)
            tl.store(at + 2, tl.minimum((begin + part + 1) * share, first + own) - lowest, mask=mask)
            tl.store(at + 3, lowest, mask=mask)
            tl.store(at + 4, tl.zeros((64,), tl.int32) + runs, mask=mask)
        for start in range(mine * 16, total, rows * 16):  # groups that have fewer runs than others
            entry = start + tl.arange(0, 16)
            at = entry % groups * share
            held_there = _runs_between(at, tl.minimum(at + share, line), begins, ends)
            mask = (entry < tl.minimum(total, capacity)) & (entry // groups >= held_there)
            tl.store(items_ptr + COLUMNS * entry + 2, tl.zeros((16,), tl.int32), mask=mask)


def allocate_runs(pieces: int, device: torch.device) -> Runs:
    """A list of rows with up to `pieces` pieces together, that may be filled again and again."""
    items = torch.zeros(pieces + MOST_GROUPS, COLUMNS.value, dtype=torch.int32, device=device)
    total, programs = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    return Runs(items, total, programs)


def fill_runs(
    work: Runs, sizes: Tensor, piece: int, programs: int, heads: int, *, share: Tensor | None = None, length: int = 0
) -> None:
    """Cut rows of `sizes` [N] int32 positions (0 for none) for so many programs and KV heads; of each multiprocessor
    that `share` (`share_triton`) leaves to decode rows, with it. `length` fixes that of runs, in pieces."""
    rows = len(sizes)
    runs_kernel[(rows,)](
        sizes, work.items, work.total, work.programs, work.total if share is None else share,
        rows, work.most, piece, programs, heads, length,
        ROWS=max(16, next_power(rows)), MOST_RUN=MOST_RUN, MOST_GROUPS=MOST_GROUPS, START=START_PIECES,
        SHARED=share is not None, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip


Entry = tuple[int, int, int, int, int]


def plain_runs(sizes: list[int], piece: int, programs: int, heads: int, length: int = 0) -> tuple[list[Entry], int]:
    """The host twin: entries as in `Runs`, those without pieces as five zeros, and the programs that go round."""
    pieces = [-(-max(0, size) // piece) for size in sizes]
    begins = [sum(pieces[:row]) for row in range(len(pieces))]
    line = sum(pieces)

    def cost(run: int) -> int:
        return -(-sum(-(-count // run) for count in pieces) * heads // programs) * (run + START_PIECES)

    best = length or min(range(1, MOST_RUN + 1), key=cost)
    equal = [
        (row, at, min(best, count - at), begins[row] + at, -(-count // best))
        for row, count in enumerate(pieces)
        for at in range(0, count, best)
    ]
    groups = min(programs // heads, MOST_GROUPS)
    if length or not groups:
        return equal, programs
    share = max(-(-line // groups), 1)
    shares: list[list[Entry]] = [[] for _ in range(groups)]
    for row, count in enumerate(pieces):
        first, end = begins[row], begins[row] + count
        whose = range(first // share, (end - 1) // share + 1) if count else range(0)
        for group in whose:
            low, high = max(first, group * share), min(end, (group + 1) * share)
            shares[group].append((row, low - first, high - low, low, len(whose)))
    if cost(best) <= max(sum(run[2] + START_PIECES for run in runs) for runs in shares):
        return equal, programs
    most = max(len(runs) for runs in shares)
    none = (0, 0, 0, 0, 0)
    return [runs[at] if at < len(runs) else none for at in range(most) for runs in shares], groups * heads
