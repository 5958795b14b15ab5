"""The KV pool: two flat tensors, and every address in them.

Owns K and V, each [slots, page_tokens, kv_heads, head_dim] with `slots_per_page` slots a page, the arithmetic from
(page, plane, layer, offset) to a cell, the fill of deeper planes when a token leaves early, and poison. A cell is one
token's K (or V) in one layer of one plane; cells are numbered through the flat pool, in 64 bits. One page lies behind
those the ledger knows: `zero_page` is never written and stands for every position that doesn't exist, so that a masked
load is clean whatever a page's last owner left there. The pool must not know requests, nor which pages are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epicycle.kvstore.layouts import KvLayout


class KvPool:
    """Written by the tick alone, in tick order."""

    def __init__(self, layout: KvLayout, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        facts, geometry = layout.facts, layout.geometry
        self.facts = facts
        self.geometry = geometry
        self.device = device
        self.pages = pages
        self.zero_page = pages
        self.page_tokens = facts.page_tokens
        shape = ((pages + 1) * facts.slots_per_page, facts.page_tokens, geometry.kv_heads, geometry.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.k_cells = self.k.view(-1, geometry.kv_heads, geometry.head_dim)
        self.v_cells = self.v.view(-1, geometry.kv_heads, geometry.head_dim)
        offsets = [start - first for start, first in zip(facts.starts, facts.firsts, strict=True)]
        # [planes] int64: start(plane) - first(plane), to which a layer's number is added
        self.plane_starts = torch.tensor(offsets, dtype=torch.int64, device=device)
        recurrent = range(geometry.first_recurrent, geometry.first_recurrent + geometry.recurrent_layers)
        self._recurrent_cells = torch.tensor(list(recurrent), device=device) * facts.page_tokens

    @property
    def zero_cell(self) -> int:
        """Layer 0's first cell of the zero page; plus any layer's shift it stays in that page."""
        return self.zero_page * self.facts.slots_per_page * self.page_tokens

    def pages_of(self, held: Tensor) -> Tensor:
        """`k` or `v` by pages: [pages + 1, S, page_tokens, kv_heads, head_dim]."""
        return held.view(self.pages + 1, self.facts.slots_per_page, *held.shape[1:])

    def layer_cells(self, layer: int) -> int:
        """What to add to a layer-0 cell to get to `layer` (same page, plane and offset)."""
        return layer * self.page_tokens

    def planes_of(self, depths: Tensor) -> Tensor:
        """The plane that each loop writes and reads."""
        return depths % self.facts.planes

    def cells(self, pages: Tensor, planes: Tensor, offsets: Tensor) -> Tensor:
        """int64 cells of layer 0, from equally shaped pages, planes and offsets inside the page."""
        slots = pages.to(torch.int64) * self.facts.slots_per_page + self.plane_starts[planes]
        return slots * self.page_tokens + offsets

    def write(self, cells: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v [N, kv_heads, head_dim] into the layer's cells; N distinct cells."""
        at = cells + self.layer_cells(layer)
        self.k_cells.index_copy_(0, at, k)
        self.v_cells.index_copy_(0, at, v)

    def fill_deeper(self, pages: Tensor, offsets: Tensor, loops_done: Tensor, max_loops: Tensor) -> None:
        """Copy the last executed plane of N tokens to the deeper planes that later tokens of theirs will read.

        All [N] int64. Planes loops_done .. min(planes, max_loops) - 1 are filled, in every recurrent layer.
        """
        until = max_loops.clamp(max=self.facts.planes)
        counts = (until - loops_done).clamp(min=0)
        token = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts)
        if not len(token):
            return
        first = torch.cumsum(counts, 0) - counts
        plane = loops_done[token] + torch.arange(len(token), device=self.device) - first[token]
        source = self.cells(pages[token], loops_done[token] - 1, offsets[token])
        target = self.cells(pages[token], plane, offsets[token])
        source = (source.unsqueeze(1) + self._recurrent_cells).flatten()
        target = (target.unsqueeze(1) + self._recurrent_cells).flatten()
        self.k_cells.index_copy_(0, target, self.k_cells.index_select(0, source))
        self.v_cells.index_copy_(0, target, self.v_cells.index_select(0, source))

    def poison(self, pages: Tensor) -> None:
        """Fill whole pages [N] with NaN: whoever reads them before writing shows it."""
        for held in (self.k, self.v):
            held.view(self.pages + 1, -1).index_fill_(0, pages.to(torch.int64), float("nan"))
