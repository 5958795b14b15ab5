"""A small paged pool with rows of several requests in it, for kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning
from epicycle.engine.models.rope import half_tables, pair_tables

PAGE_TOKENS = 4
SLOTS_PER_PAGE = 6
PAGES_EACH = 12
CONTEXT = PAGES_EACH * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Paged:
    """`heads` query heads over a pool that is NaN wherever no request has history."""

    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    k: Tensor
    v: Tensor
    table: Tensor

    def rows(self, slots: Sequence[int], positions: Sequence[int], plane_slots: Sequence[int]) -> RowAddresses:
        columns = torch.tensor([list(slots), list(positions), list(plane_slots)], dtype=torch.int32)
        return RowAddresses(columns[0], columns[1], columns[2], self.table, SLOTS_PER_PAGE)

    def remember(self, slot: int, plane_slot: int, length: int, layer: int) -> None:
        """Random K and V for positions 0 .. length - 1."""
        if length == 0:
            return
        at = self.rows([slot] * length, range(length), [plane_slot] * length).cells(layer, PAGE_TOKENS)
        for pool in (self.k, self.v):
            pool.view(-1, self.kv_heads, self.width)[at] = torch.randn(length, self.kv_heads, self.width).to(self.dtype)

    def turning(self, pairs: bool) -> Turning:
        if not pairs:
            return Turning(*half_tables(self.width, 1e4, CONTEXT, dtype=self.dtype, device=torch.device("cpu")), False)
        bias = torch.randn(2, self.heads * self.width).to(self.dtype)
        return Turning(*pair_tables(self.width, 1e4, CONTEXT), True, bias)


def paged(heads: int, kv_heads: int, width: int, dtype: torch.dtype, requests: int = 4) -> Paged:
    """Pages in shuffled order; nothing written yet."""
    pages = requests * PAGES_EACH
    k = torch.full((pages * SLOTS_PER_PAGE, PAGE_TOKENS, kv_heads, width), float("nan")).to(dtype)
    table = torch.randperm(pages, dtype=torch.int32).view(requests, PAGES_EACH)
    return Paged(heads, kv_heads, width, dtype, k, k.clone(), table)


def equal(a: Tensor, b: Tensor) -> bool:
    """Bits, with NaN equal to itself."""
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())
