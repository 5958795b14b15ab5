"""Where the KV of one executor lies, in blocks that a connector can be told of once and then name by number.

Owns the arithmetic from (page, plane) to block numbers and from those to addresses. Blocks come in rows of equal
blocks at equal distances: K and V of each plane (a block is all live layers of one page), single tokens of K and of V
(for a last page that isn't full), and head rows. Layers that never write a plane belong to none of its blocks. It must
not know requests, peers or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import LayoutFacts

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What is the same on every executor that may exchange KV. `planes` holds (first live slot in the page, live slots)
    and `done_at` the loop after which nothing writes the plane any more."""

    planes: tuple[tuple[int, int], ...]
    done_at: tuple[int, ...]
    slots_per_page: int
    page_tokens: int
    cell_bytes: int  # of K, or of V
    head_bytes: int

    @property
    def slot_bytes(self) -> int:
        return self.page_tokens * self.cell_bytes

    def unit_bytes(self, plane: int, tokens: int) -> int:
        """K and V of the first `tokens` positions of one page in one plane."""
        return 2 * self.planes[plane][1] * tokens * self.cell_bytes

    @property
    def largest_unit_bytes(self) -> int:
        return max(self.unit_bytes(plane, self.page_tokens) for plane in range(len(self.planes)))


def block_shape(facts: LayoutFacts, geometry: KvGeometry, head_bytes: int) -> BlockShape:
    """The shape of a pool of this layout; `head_bytes` is the size of a head row."""
    first, recurrent = geometry.first_recurrent, geometry.recurrent_layers
    deeper = [(facts.starts[plane] + first - facts.firsts[plane], recurrent) for plane in range(1, facts.planes)]
    last = geometry.loops - 1
    done_at = [last - (last - plane) % facts.planes for plane in range(facts.planes)]
    if geometry.layers > first + recurrent:
        done_at[0] = last  # layers that run once after the loops lie in plane 0
    return BlockShape(
        planes=((0, geometry.layers), *deeper),
        done_at=tuple(done_at),
        slots_per_page=facts.slots_per_page,
        page_tokens=facts.page_tokens,
        cell_bytes=geometry.cell_bytes // 2,
        head_bytes=head_bytes,
    )


class Blocks:
    """The blocks of one executor, from the addresses and sizes of its K, V and head rows."""

    def __init__(self, shape: BlockShape, k: tuple[int, int], v: tuple[int, int], heads: tuple[int, int]) -> None:
        self.shape = shape
        page_bytes = shape.slots_per_page * shape.slot_bytes
        self.pages = k[1] // page_bytes
        assert (self.pages * page_bytes, k[1]) == (k[1], v[1]), "a pool is whole pages, K and V alike"
        cells = self.pages * shape.slots_per_page * shape.page_tokens
        rows: list[tuple[int, int, int, int]] = []  # address of the first, bytes, distance, count
        for address, _ in (k, v):
            for start, count in shape.planes:
                block = count * shape.slot_bytes
                rows.append((address + start * shape.slot_bytes, block, page_bytes, self.pages))
        rows.extend((address, shape.cell_bytes, shape.cell_bytes, cells) for address, _ in (k, v))
        rows.append((heads[0], shape.head_bytes, shape.head_bytes, heads[1] // shape.head_bytes))
        self.rows = np.array(rows, dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self.rows[:, 3])))
        assert self._offsets[-1] < 1 << 31, "block numbers are 32 bits wide"

    def whole(self, pages: Numbers, planes: Numbers) -> Numbers:
        """[2 N] block numbers of whole pages [N] in planes [N]: K of all, then V of all."""
        k = self._offsets[planes] + pages
        return np.concatenate((k, self._offsets[planes + len(self.shape.planes)] + pages))

    def part(self, page: int, plane: int, tokens: int) -> Numbers:
        """Block numbers of the first `tokens` positions of a page in one plane, token by token: K, then V."""
        shape = self.shape
        start, count = shape.planes[plane]
        slots = page * shape.slots_per_page + start + np.arange(count, dtype=np.int64)
        cells = (slots[:, None] * shape.page_tokens + np.arange(tokens, dtype=np.int64)).ravel()
        first = 2 * len(shape.planes)
        return np.concatenate((self._offsets[first] + cells, self._offsets[first + 1] + cells))

    def head(self, row: int) -> Numbers:
        """[1] the block number of a head row."""
        return self._offsets[-2:-1] + row

    def spans(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """(addresses, bytes) of blocks [N]."""
        row = np.searchsorted(self._offsets, numbers, side="right") - 1
        address, size, distance, _ = self.rows[row].T
        return address + (numbers - self._offsets[row]) * distance, size
