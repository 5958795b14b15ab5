"""A simple `Rows`: dense caches per plane, one per sequence, attention row by row in plain float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from epicycle.engine.models.spec import ModelSpec


@dataclass
class SequenceCache:
    """K and V of one sequence, [planes, context, kv_heads, head_dim] per layer.

    `last` [context] is the deepest plane each token wrote: a query in plane d reads version min(d, last).
    """

    spec: ModelSpec
    context: int
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    last: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.spec.loops, self.context, self.spec.kv_heads, self.spec.head_dim)
        self.keys = [torch.full(shape, torch.nan) for _ in range(self.spec.layers)]
        self.values = [torch.full(shape, torch.nan) for _ in range(self.spec.layers)]
        self.last = torch.full((self.context,), self.spec.loops - 1)


class DenseRows:
    """Rows of any sequences: row i belongs to `caches[i]` at `positions[i]`, about to run loop `depths[i]`."""

    def __init__(self, caches: list[SequenceCache], positions: list[int], depths: list[int], noise_seed: int = 0):
        self.caches = caches
        self.positions = torch.tensor(positions)
        self.depths = torch.tensor(depths)
        self.noise_seeds = torch.full((len(positions),), noise_seed)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, self.depths.tolist())

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, [0] * len(self.caches))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, planes: list[int]) -> Tensor:
        addresses = list(zip(self.caches, self.positions.tolist(), planes, strict=True))
        for row, (cache, position, plane) in enumerate(addresses):
            cache.keys[layer][plane, position] = k[row]
            cache.values[layer][plane, position] = v[row]
        return torch.stack([_history(q[row], layer, *address) for row, address in enumerate(addresses)])


def _history(q: Tensor, layer: int, cache: SequenceCache, position: int, plane: int) -> Tensor:
    """Attention of one query [heads, d] over positions 0..position."""
    seen = torch.arange(position + 1)
    version = cache.last[: position + 1].clamp(max=plane)
    group = cache.spec.heads // cache.spec.kv_heads
    keys = cache.keys[layer][version, seen].repeat_interleave(group, dim=1)
    values = cache.values[layer][version, seen].repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,phd->hp", q.float(), keys) * cache.spec.head_dim**-0.5
    return torch.einsum("hp,phd->hd", scores.softmax(dim=-1), values).to(q.dtype)
