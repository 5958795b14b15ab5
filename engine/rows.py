"""The rows of one traversal, as a model sees them: positions, depths, and attention over their own KV.

Owns the plans that tell the attention kernels where each row's history lies; a plan is built when a layer first asks
and then serves every layer of the traversal. Decode rows come first, then prompt rows (a request's rows in one run, in
position order, all at one depth), then padding rows, which own no KV and get zeros. It reads the page table and must
not know requests, leases or what becomes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.attention import KV_TILE, QUERY_TILE, TileWork, attend_tiles, tile_order, tile_work
from epicycle.engine.pool import KvPool


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where N rows lie. Tensors [N] int64; rows beyond decode + prompt are padding."""

    slots: Tensor
    positions: Tensor
    depths: Tensor
    noise_seeds: Tensor
    ends: Tensor  # positions of the row's request that hold KV at this depth once this traversal has written its own
    decode_rows: int
    prompt_rows: int

    @property
    def live_rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    def pick(self, decode: Tensor, prompt: Tensor, row_tile: int) -> RowLayout:
        """The layout of some rows, from indexes of decode rows and of prompt rows, each ascending.

        It is padded to a multiple of `row_tile` with copies of row 0's metadata.
        """
        live = len(decode) + len(prompt)
        index = torch.cat((decode, prompt, decode.new_zeros(-live % row_tile)))
        return RowLayout(
            slots=self.slots[index],
            positions=self.positions[index],
            depths=self.depths[index],
            noise_seeds=self.noise_seeds[index],
            ends=self.ends[index],
            decode_rows=len(decode),
            prompt_rows=len(prompt),
        )


@dataclass(frozen=True, slots=True)
class _PromptWork:
    work: TileWork
    tiles: int
    row_tile: Tensor  # [n] int64, rank of each prompt row's query tile in `work`'s order
    row_lane: Tensor  # [n] int64, its place there


@dataclass(frozen=True, slots=True)
class _Plan:
    writes: Tensor  # [live] int64 cells of layer 0
    decode: TileWork | None
    decode_order: Tensor | None  # [decode] int64, None where rows are in the work's order
    prompt: _PromptWork | None


class TickRows:
    """Meets `models.base.Rows` over a `KvPool`. `page_table` [slots, pages a request can have] int32."""

    def __init__(self, pool: KvPool, page_table: Tensor, layout: RowLayout) -> None:
        self._pool = pool
        self._page_table = page_table
        self.layout = layout
        self._loop_plan: _Plan | None = None
        self._once_plan: _Plan | None = None

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    @property
    def depths(self) -> Tensor:
        return self.layout.depths

    @property
    def noise_seeds(self) -> Tensor:
        return self.layout.noise_seeds

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._loop_plan is None:
            self._loop_plan = self._plan(self._pool.planes_of(self.layout.depths))
        return self._attend(self._loop_plan, layer, q, k, v)

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._once_plan is None:
            self._once_plan = self._plan(torch.zeros_like(self.layout.depths))
        return self._attend(self._once_plan, layer, q, k, v)

    def _attend(self, plan: _Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        live, decode = self.layout.live_rows, self.layout.decode_rows
        self._pool.write(plan.writes, layer, k[:live], v[:live])
        parts = []
        if plan.decode is not None:
            parts.append(self._attend_decode(plan.decode, plan.decode_order, layer, q[:decode]))
        if plan.prompt is not None:
            parts.append(self._attend_prompt(plan.prompt, layer, q[decode:live]))
        if live < len(q):
            parts.append(q.new_zeros(len(q) - live, *q.shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend_decode(self, work: TileWork, order: Tensor | None, layer: int, q: Tensor) -> Tensor:
        pool, (rows, heads, width) = self._pool, q.shape
        kv_heads = pool.geometry.kv_heads
        ordered = q if order is None else q[order]
        blocks = ordered.reshape(rows, kv_heads, 1, heads // kv_heads, width)
        mixed = attend_tiles(blocks, pool.k_cells, pool.v_cells, work, pool.layer_cells(layer))
        out = mixed.view(rows, heads, width).to(q.dtype)
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _attend_prompt(self, plan: _PromptWork, layer: int, q: Tensor) -> Tensor:
        pool, (rows, heads, width) = self._pool, q.shape
        kv_heads = pool.geometry.kv_heads
        blocks = q.new_zeros(plan.tiles, QUERY_TILE, heads, width)
        blocks[plan.row_tile, plan.row_lane] = q
        blocks = blocks.view(plan.tiles, QUERY_TILE, kv_heads, heads // kv_heads, width).transpose(1, 2)
        mixed = attend_tiles(blocks, pool.k_cells, pool.v_cells, plan.work, pool.layer_cells(layer))
        lanes = mixed.view(plan.tiles, kv_heads, QUERY_TILE, heads // kv_heads, width).transpose(1, 2)
        return lanes[plan.row_tile, plan.row_lane].reshape(rows, heads, width).to(q.dtype)

    def _plan(self, planes: Tensor) -> _Plan:
        rows, live, decode = self.layout, self.layout.live_rows, self.layout.decode_rows
        writes = self._cells(rows.slots[:live], planes[:live], rows.positions[:live])
        work, order = self._decode_work(planes[:decode])
        prompt = self._prompt_work(planes[decode:live]) if rows.prompt_rows else None
        return _Plan(writes=writes, decode=work, decode_order=order, prompt=prompt)

    def _cells(self, slots: Tensor, planes: Tensor, positions: Tensor) -> Tensor:
        page = torch.div(positions, self._pool.page_tokens, rounding_mode="floor")
        pages = self._page_table[slots, page.clamp_(max=self._page_table.shape[1] - 1)]
        return self._pool.cells(pages, planes, positions % self._pool.page_tokens)

    def _history(self, slots: Tensor, planes: Tensor, ends: Tensor, keys: Tensor) -> Tensor:
        """Cells of key positions [W, KV_TILE] of pairs [W]; positions not written yet are in the zero page."""
        cells = self._cells(slots.unsqueeze(1), planes.unsqueeze(1), keys)
        return torch.where(keys < ends.unsqueeze(1), cells, self._pool.zero_cell)

    def _decode_work(self, planes: Tensor) -> tuple[TileWork | None, Tensor | None]:
        rows, count = self.layout, self.layout.decode_rows
        if not count:
            return None, None
        ends = rows.ends[:count]
        order = tile_order((ends + KV_TILE - 1) // KV_TILE)
        keys = order.tile.unsqueeze(1) * KV_TILE + torch.arange(KV_TILE, device=ends.device)
        row = order.block if order.order is None else order.order[order.block]
        cells = self._history(rows.slots[row], planes[row], ends[row], keys)
        hidden = (keys >= ends[row].unsqueeze(1)).view(-1, 1, 1, 1, KV_TILE)
        return tile_work(order, cells, hidden, self._pool.geometry.kv_heads), order.order

    def _prompt_work(self, planes: Tensor) -> _PromptWork:
        rows, first, until = self.layout, self.layout.decode_rows, self.layout.live_rows
        slots, positions, ends = rows.slots[first:until], rows.positions[first:until], rows.ends[first:until]
        grid = positions // QUERY_TILE
        starts_tile = torch.ones_like(grid, dtype=torch.bool)
        starts_tile[1:] = (grid[1:] != grid[:-1]) | (slots[1:] != slots[:-1])
        heads = starts_tile.nonzero().squeeze(1)  # the first row of every query tile speaks for it
        order = tile_order(grid[heads] * QUERY_TILE // KV_TILE + 1)
        keys = order.tile.unsqueeze(1) * KV_TILE + torch.arange(KV_TILE, device=grid.device)
        row = heads[order.block if order.order is None else order.order[order.block]]
        cells = self._history(slots[row], planes[row], ends[row], keys)
        lanes = grid[row].unsqueeze(1) * QUERY_TILE + torch.arange(QUERY_TILE, device=grid.device)
        hidden = keys.view(-1, 1, 1, 1, KV_TILE) > lanes.view(-1, 1, QUERY_TILE, 1, 1)
        tile = torch.cumsum(starts_tile, 0) - 1
        return _PromptWork(
            work=tile_work(order, cells, hidden, self._pool.geometry.kv_heads),
            tiles=len(heads),
            row_tile=tile if order.order is None else torch.argsort(order.order)[tile],
            row_lane=positions % QUERY_TILE,
        )
