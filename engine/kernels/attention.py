"""Attention over the paged pool on a CPU: decode rows and prompt rows, and the plain twin of both.

Owns the order of attention's sums. A row's history is cut in KV tiles of `KV_TILE` positions from position 0, and the
softmax runs over tiles in that order, so that a row's bits follow from its own length alone. All products have one
fixed shape: decode rows multiply one query (per KV head and group) with one tile; prompt rows sit in query tiles on a
fixed grid of positions, so that neither chunking nor company moves a row inside its tile. A plan is made once per
traversal and serves every layer. Positions a row doesn't have are read from the pool's zero page. It knows pages and
planes only through the cells handed in, and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KV_TILE = 64  # positions
QUERY_TILE = 16  # positions; divides KV_TILE, so that all rows of a query tile have equally many KV tiles
MOST_TILES = 512  # KV tiles gathered at once: bounds the copy to a few tens of MiB


@dataclass(frozen=True, slots=True)
class TileWork:
    """(query block, KV tile) pairs: first every block's tile 0, then tile 1 of the blocks that have one, and so on.

    Blocks are ordered by falling number of tiles, so those that have tile j are the first `live[j]`. A block is one
    decode row or one query tile; it has `lanes` query rows.
    """

    live: list[int]
    block: Tensor  # [W] int64, the block of each pair
    cells: Tensor  # [W, KV_TILE] int64, layer-0 cells
    hidden: Tensor  # [W, 1, lanes, 1, KV_TILE] bool, True where a key is not to be seen


def tile_order(tiles: Tensor) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """Blocks with `tiles` [B] >= 1 tiles each -> (order [B], live, block of each pair [W], tile of each pair [W])."""
    order = torch.argsort(tiles, descending=True, stable=True)
    counts: list[int] = tiles[order].tolist()
    live = [sum(count > tile for count in counts) for tile in range(counts[0])]
    index = torch.arange(len(counts), device=tiles.device)
    block = torch.cat([index[:count] for count in live])
    tile = torch.repeat_interleave(torch.arange(len(live), device=tiles.device), torch.tensor(live).to(tiles.device))
    return order, live, block, tile


def attend_tiles(q: Tensor, k_cells: Tensor, v_cells: Tensor, work: TileWork, layer_cells: int) -> Tensor:
    """q [B, kv_heads, lanes, group, head_dim] of the blocks in `work`'s order, k_cells and v_cells the flat pool.

    Returns [B, kv_heads, lanes * group, head_dim] float32.
    """
    blocks, kv_heads, lanes, group, width = q.shape
    queries = (q.float() * width**-0.5).reshape(blocks, kv_heads, lanes * group, width)
    heads = torch.arange(kv_heads, device=q.device).view(1, kv_heads, 1)
    cells = (work.cells + layer_cells).unsqueeze(1) * kv_heads + heads  # [W, kv_heads, KV_TILE]
    scores = _scores(queries, k_cells.view(-1, width), work, cells)
    scores.view(-1, kv_heads, lanes, group, KV_TILE).masked_fill_(work.hidden, float("-inf"))
    top = _highest(scores.amax(-1), work.live)
    weights = torch.exp(scores - top[work.block].unsqueeze(-1))
    total = _sum_tiles(weights.sum(-1), work.live)
    return _mix(weights, v_cells.view(-1, width), work, cells) / total.unsqueeze(-1)


def _gather(flat: Tensor, cells: Tensor) -> Tensor:
    """[W, kv_heads, KV_TILE, head_dim] float32, flattened over the first two axes."""
    rows = flat.index_select(0, cells.reshape(-1))
    return rows.view(-1, KV_TILE, flat.shape[1]).float()


def _scores(queries: Tensor, keys: Tensor, work: TileWork, cells: Tensor) -> Tensor:
    parts = []
    for block, cell in zip(torch.split(work.block, MOST_TILES), torch.split(cells, MOST_TILES), strict=True):
        q = queries[block].flatten(0, 1)
        parts.append(torch.bmm(q, _gather(keys, cell).transpose(1, 2)))
    scores = torch.cat(parts) if len(parts) > 1 else parts[0]
    return scores.view(-1, *queries.shape[1:3], KV_TILE)


def _mix(weights: Tensor, values: Tensor, work: TileWork, cells: Tensor) -> Tensor:
    parts = []
    for weight, cell in zip(torch.split(weights, MOST_TILES), torch.split(cells, MOST_TILES), strict=True):
        parts.append(torch.bmm(weight.flatten(0, 1), _gather(values, cell)))
    mixed = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _sum_tiles(mixed.view(-1, *weights.shape[1:3], values.shape[1]), work.live)


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
