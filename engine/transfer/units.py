"""Units of a transfer, and how they become writes.

A unit is one page of a request in one plane, or its head row; the last page counts with its valid tokens only. Owns
the choice of units for one write (in order of pages, up to a number of bytes), the pairs of blocks that carry them,
sorted so that neighbours on both sides stand side by side, and the runs by which a write names its units. It must not
know events, peers' links or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from epicycle.engine.transfer.blocks import Blocks, BlockShape, Numbers
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.wire.columns import I32, pack, unpack_list

HEAD = -1  # the plane of a head row

Unit = tuple[int, int]  # (page of the request, plane)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a prompt travels: pages `first_page` .. of so many tokens, in every plane, and the head row."""

    shape: BlockShape
    first_page: int
    prompt_tokens: int

    @property
    def end_page(self) -> int:
        return pages_for(self.prompt_tokens, self.shape.page_tokens)

    def tokens(self, page: int) -> int:
        """Valid tokens of a page."""
        return min(self.shape.page_tokens, self.prompt_tokens - page * self.shape.page_tokens)

    def bytes_of(self, unit: Unit) -> int:
        page, plane = unit
        return self.shape.head_bytes if plane == HEAD else self.shape.unit_bytes(plane, self.tokens(page))

    def units(self) -> set[Unit]:
        """All of them."""
        planes = range(len(self.shape.planes))
        return {(page, plane) for page in range(self.first_page, self.end_page) for plane in planes} | {(0, HEAD)}

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of(unit) for unit in self.units())


@dataclass(frozen=True, slots=True)
class Place:
    """Where one side keeps a request: its blocks, the pages that hold pages `first_page` .. of it, its head row."""

    blocks: Blocks
    first_page: int
    pages: Sequence[int]
    head_row: int

    def page(self, page: int) -> int:
        return self.pages[page - self.first_page]


def take_units(cut: Cut, waiting: set[Unit], most_bytes: int) -> list[Unit]:
    """Units of the next write, taken out of `waiting`: whole pages first to last, the head row at the end."""
    taken: list[Unit] = []
    for unit in sorted(waiting, key=lambda unit: (unit[1] == HEAD, unit)):
        size = cut.bytes_of(unit)
        if size > most_bytes:
            break
        most_bytes -= size
        taken.append(unit)
    waiting.difference_update(taken)
    return taken


def pairs(cut: Cut, units: Iterable[Unit], here: Place, there: Place) -> tuple[Numbers, Numbers]:
    """(block numbers here, block numbers there) of `units`, ascending by the address here."""
    whole: list[Unit] = []
    sources: list[Numbers] = []
    targets: list[Numbers] = []
    for page, plane in units:
        if plane == HEAD:
            sources.append(here.blocks.head(here.head_row))
            targets.append(there.blocks.head(there.head_row))
        elif cut.tokens(page) == cut.shape.page_tokens:
            whole.append((page, plane))
        else:
            sources.append(here.blocks.part(here.page(page), plane, cut.tokens(page)))
            targets.append(there.blocks.part(there.page(page), plane, cut.tokens(page)))
    planes = np.array([plane for _, plane in whole], dtype=np.int64)
    for found, place in ((sources, here), (targets, there)):
        found.append(place.blocks.whole(np.array([place.page(page) for page, _ in whole], dtype=np.int64), planes))
    source, target = np.concatenate(sources), np.concatenate(targets)
    order = np.argsort(here.blocks.spans(source)[0], kind="stable")
    return source[order], target[order]


def segments(source: Numbers, target: Numbers, here: Blocks, there: Blocks) -> tuple[Numbers, Numbers, Numbers]:
    """(addresses here, addresses there, bytes) of paired blocks, those that follow each other on both sides as one."""
    start, size = here.spans(source)
    to, _ = there.spans(target)
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = (start[1:] != start[:-1] + size[:-1]) | (to[1:] != to[:-1] + size[:-1])
    firsts = np.flatnonzero(is_first)
    return start[firsts], to[firsts], np.add.reduceat(size, firsts)


def runs_of(units: Iterable[Unit]) -> bytes:
    """Units as `Arrived.runs`."""
    runs: list[int] = []
    for page, plane in sorted(units, key=lambda unit: (unit[1], unit[0])):
        if runs and runs[-1] == plane and runs[-3] + runs[-2] == page:
            runs[-2] += 1
        else:
            runs += [page, 1, plane]
    return pack(I32, runs)


def units_of(runs: bytes) -> list[Unit]:
    """What `runs_of` packed. Raises ValueError for what it can't have."""
    numbers = unpack_list(I32, runs)
    if len(numbers) % 3:
        raise ValueError(f"{len(numbers)} numbers are no runs")
    return [
        (page, plane)
        for first, count, plane in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        for page in range(first, first + count)
    ]
