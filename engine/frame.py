"""The rows of one device tick: decode rows, then prompt rows, some of them inert.

Owns `Frame`, whose tensors are what the device itself found out about its rows, and `FrameRows`, the plain way to
compute attention over them: it looks which rows are live (a wait, on a GPU) and hands those to `TickRows`. It must not
know requests, nor how rows were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.models.base import Rows
from epicycle.engine.pool import KvPool
from epicycle.engine.rows import RowLayout, TickRows


@dataclass(frozen=True, slots=True)
class Frame:
    """N = decode_rows + prompt_rows rows; tensors [N] int64, `live` [N] bool. Rows that aren't live own no KV."""

    decode_rows: int
    prompt_rows: int
    slots: Tensor
    positions: Tensor
    depths: Tensor
    noise_seeds: Tensor
    ends: Tensor  # positions of the row's request that hold KV at its depth once the traversal has written its own
    live: Tensor
    chunks: Tensor  # [2, C] int64: first prompt row and rows of each chunk, 0 rows for none

    def only(self, live: Tensor) -> Frame:
        """The same rows, those outside `live` [N] bool inert."""
        return replace(self, live=self.live & live)

    def deeper(self, loops: int) -> Frame:
        """The same rows, `loops` further on."""
        return replace(self, depths=self.depths + loops)


class FrameAttention(Protocol):
    """Makes what a model reads its rows through, for one traversal."""

    def rows(self, frame: Frame) -> Rows: ...


class PlainAttention:
    """Meets `FrameAttention` by plain torch, for any device; on a GPU every traversal waits for it."""

    def __init__(self, pool: KvPool, page_table: Tensor) -> None:
        self._pool = pool
        self._page_table = page_table

    def rows(self, frame: Frame) -> FrameRows:
        return FrameRows(self._pool, self._page_table, frame)


class FrameRows:
    """Meets `models.base.Rows`; attention of inert rows is zero."""

    def __init__(self, pool: KvPool, page_table: Tensor, frame: Frame) -> None:
        self.positions, self.depths, self.noise_seeds = frame.positions, frame.depths, frame.noise_seeds
        decode = frame.live[: frame.decode_rows].nonzero().squeeze(1)
        prompt = frame.live[frame.decode_rows :].nonzero().squeeze(1) + frame.decode_rows
        self._index = torch.cat((decode, prompt))
        layout = RowLayout(
            slots=frame.slots[self._index],
            positions=frame.positions[self._index],
            depths=frame.depths[self._index],
            noise_seeds=frame.noise_seeds[self._index],
            ends=frame.ends[self._index],
            decode_rows=len(decode),
            prompt_rows=len(prompt),
        )
        self._rows = TickRows(pool, page_table, layout)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not len(self._index):
            return torch.zeros_like(q)
        live = self._rows.attend(layer, q[self._index], k[self._index], v[self._index])
        return torch.zeros_like(q).index_copy_(0, self._index, live)

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not len(self._index):
            return torch.zeros_like(q)
        live = self._rows.attend_once(layer, q[self._index], k[self._index], v[self._index])
        return torch.zeros_like(q).index_copy_(0, self._index, live)
