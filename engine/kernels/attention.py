"""Attention over the paged pool on a CPU: decode rows and prompt rows, and the plain twin of both.

Owns the order of attention's sums. A row's history is cut in KV tiles of `KV_TILE` positions from position 0, and the
softmax runs over tiles in that order, so that a row's bits follow from its own length alone. All products have one
fixed shape: decode rows multiply one query (per KV head and group) with one tile; prompt rows sit in query tiles on a
fixed grid of positions, so that neither chunking nor company moves a row inside its tile. A plan is made once per
traversal and serves every layer. Positions a row doesn't have are read from the pool's zero page. It knows pages and
planes only through the cells handed in, and no request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

KV_TILE = 64  # positions
QUERY_TILE = 16  # positions; divides KV_TILE, so that all rows of a query tile have equally many KV tiles
MOST_TILES = 2048  # KV tiles of one head gathered at once: bounds the copy to a few tens of MiB


@dataclass(frozen=True, slots=True)
class TileWork:
    """(query block, KV tile) pairs: first every block's tile 0, then tile 1 of the blocks that have one, and so on.

    Blocks are ordered by falling number of tiles, so those that have tile j are the first `live[j]`. A block is one
    decode row or one query tile; it has `lanes` query rows.
    """

    live: list[int]
    block: Tensor | None  # [W] int64, the block of each pair; None where every block has one tile
    cells: Tensor  # [W, kv_heads, KV_TILE] int64: (layer-0 cell) * kv_heads + head
    hidden: Tensor  # [W, 1, lanes, 1, KV_TILE] bool, True where a key is not to be seen


@dataclass(frozen=True, slots=True)
class TileOrder:
    """Blocks in falling order of their tiles; `order` [B] is None where they are in it already."""

    order: Tensor | None
    live: list[int]
    block: Tensor  # [W] int64
    tile: Tensor  # [W] int64


def tile_order(tiles: Tensor) -> TileOrder:
    """The pairs of blocks with `tiles` [B] int64, each at least 1."""
    counts: list[int] = tiles.tolist()
    falling = all(left >= right for left, right in pairwise(counts))
    order = None if falling else torch.argsort(tiles, descending=True, stable=True)
    index = torch.arange(max(counts), device=tiles.device)
    live = (tiles.unsqueeze(1) > index).sum(0)
    tile = torch.repeat_interleave(index, live)
    block = torch.arange(len(tile), device=tiles.device) - (live.cumsum(0) - live)[tile]
    return TileOrder(order, live.tolist(), block, tile)


def tile_work(order: TileOrder, cells: Tensor, hidden: Tensor, kv_heads: int) -> TileWork:
    """Work over layer-0 cells [W, KV_TILE] of the pairs of `order`; `hidden` as in `TileWork`."""
    heads = torch.arange(kv_heads, device=cells.device).view(1, kv_heads, 1)
    block = order.block if len(order.live) > 1 else None
    return TileWork(order.live, block, cells.unsqueeze(1) * kv_heads + heads, hidden)


def attend_tiles(q: Tensor, k_cells: Tensor, v_cells: Tensor, work: TileWork, layer_cells: int) -> Tensor:
    """q [B, kv_heads, lanes, group, head_dim] of the blocks in `work`'s order, k_cells and v_cells the flat pool.

    Returns [B, kv_heads, lanes * group, head_dim] float32.
    """
    blocks, kv_heads, lanes, group, width = q.shape
    queries = (q.float() * width**-0.5).reshape(blocks, kv_heads, lanes * group, width)
    cells = (work.cells + layer_cells * kv_heads).view(-1)
    scores = _scores(queries, k_cells.view(-1, width), work, cells)
    scores.view(-1, kv_heads, lanes, group, KV_TILE).masked_fill_(work.hidden, float("-inf"))
    top = _highest(scores.amax(-1, keepdim=True), work.live)
    weights = scores.sub_(top if work.block is None else top[work.block]).exp_()
    mixed = _sum_tiles(_mix(weights, v_cells.view(-1, width), cells), work.live)
    return mixed.div_(_sum_tiles(weights.sum(-1, keepdim=True), work.live))


def _scores(queries: Tensor, keys: Tensor, work: TileWork, cells: Tensor) -> Tensor:
    """[W, kv_heads, lanes * group, KV_TILE]"""
    pairs = queries if work.block is None else queries[work.block]
    parts = [torch.bmm(q, k.transpose(1, 2)) for q, k in _tiles(pairs.flatten(0, 1), keys, cells)]
    return _joined(parts).view(*pairs.shape[:3], KV_TILE)


def _mix(weights: Tensor, values: Tensor, cells: Tensor) -> Tensor:
    """[W, kv_heads, lanes * group, head_dim]"""
    parts = [torch.bmm(p, v) for p, v in _tiles(weights.flatten(0, 1), values, cells)]
    return _joined(parts).view(*weights.shape[:3], values.shape[1])


def _tiles(left: Tensor, flat: Tensor, cells: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of left [tiles, ..] with the cells that belong to them, [tiles, KV_TILE, head_dim] float32."""
    for first in range(0, left.shape[0], MOST_TILES):
        rows = flat.index_select(0, cells[first * KV_TILE : (first + MOST_TILES) * KV_TILE])
        yield left[first : first + MOST_TILES], rows.view(-1, KV_TILE, flat.shape[1]).float()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _highest(parts: Tensor, live: list[int]) -> Tensor:
    """Each block's maximum over its tiles. `parts` [W, ...] is used up."""
    result, start = parts[: live[0]], live[0]
    for count in live[1:]:
        torch.maximum(result[:count], parts[start : start + count], out=result[:count])
        start += count
    return result


def _sum_tiles(parts: Tensor, live: list[int]) -> Tensor:
    """Sum each block's tiles, tile 0 first. `parts` [W, ...] is used up."""
    result, start = parts[: live[0]], live[0]
    for count in live[1:]:
        result[:count] += parts[start : start + count]
        start += count
    return result


def attend_plain(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The plain twin for ONE row: q [heads, head_dim] over its history keys, values [T, kv_heads, head_dim].

    Computed in the dtype of q; softmax over everything at once. Returns [heads, head_dim].
    """
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,thd->ht", q * q.shape[1] ** -0.5, keys)
    return torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), values)
