"""Where a request's KV first differs between two runs: the earliest tensor that a trial and its solo run disagree on.

Owns the copy of a request's KV at its end, in an order that any layout of pages shares (plane, then layer), and the
comparison of two of them, bit by bit, in the order in which values are made. It must not know why runs differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.pool import KvPool
from epicycle.kvstore.reserve import pages_for

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class KvCopy:
    """K and V of one request on the host: [pages, S, page_tokens, kv_heads, d], with the places of planes in S."""

    k: Tensor
    v: Tensor
    starts: list[int]  # start(plane) - first(plane)
    first_recurrent: int
    recurrent_layers: int
    layers: int
    positions: int  # that hold KV

    def layers_of(self, plane: int) -> range:
        return (
            range(self.first_recurrent, self.first_recurrent + self.recurrent_layers) if plane else range(self.layers)
        )

    def rows(self, held: Tensor, plane: int, layer: int) -> Tensor:
        """The bits of every position: [positions, kv_heads * d]."""
        cells = held[:, self.starts[plane] + layer].flatten(0, 1)[: self.positions].flatten(1)
        return cells.view(_BITS[cells.element_size()])


@dataclass(frozen=True, slots=True, order=True)
class TensorPlace:
    """Ordered as values are made: position by position, loop by loop, layer by layer, K before V."""

    position: int
    plane: int
    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of layer {self.layer} in plane {self.plane} at position {self.position}"


def copy_kv(pool: KvPool, pages: Sequence[int], positions: int) -> KvCopy:
    """What the pool holds of a request in `pages` now; waits for the device."""
    geometry = pool.geometry
    at = torch.tensor(pages[: pages_for(positions, pool.page_tokens)], dtype=torch.int64, device=pool.device)
    k, v = (pool.pages_of(held).index_select(0, at).cpu() for held in (pool.k, pool.v))
    return KvCopy(
        k=k,
        v=v,
        starts=pool.plane_starts.tolist(),
        first_recurrent=geometry.first_recurrent,
        recurrent_layers=geometry.recurrent_layers,
        layers=geometry.layers,
        positions=positions,
    )


def first_different(expected: KvCopy, actual: KvCopy) -> TensorPlace | None:
    """The earliest value that isn't bit-equal, over the positions that both hold; None where all are."""
    found: list[TensorPlace] = []
    for plane in range(len(expected.starts)):
        for layer in expected.layers_of(plane):
            for name, one, other in (("K", expected.k, actual.k), ("V", expected.v, actual.v)):
                rows, others = expected.rows(one, plane, layer), actual.rows(other, plane, layer)
                both = min(len(rows), len(others))
                differs = (rows[:both] != others[:both]).any(dim=1)
                if bool(differs.any()):
                    found.append(TensorPlace(int(differs.to(torch.uint8).argmax()), plane, layer, name))
    return min(found, default=None)
