"""Attention of a device tick's rows through the GPU kernels, without a host value.

Owns the device metadata that the kernels take (addresses, work lists) and their buffers, made once for the largest
tick. A traversal's metadata is made when a layer first asks and serves all its layers. Rows that aren't live read and
write nothing, and what comes out for them means nothing. It must not know how rows were chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epicycle.engine.frame import Frame
from epicycle.engine.kernels.decode_attention_triton import PIECE, allocate_scratch, decode_attention, list_runs
from epicycle.engine.kernels.prompt_attention_triton import QUERY_TILE, PromptChunks, prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.tick_triton import addresses, write_kv
from epicycle.engine.kernels.work_triton import allocate_work, fill_work
from epicycle.engine.pool import KvPool
from epicycle.engine.tick_inputs import MOST_CHUNKS

ROWS_TO_TURN_APART = 16  # from here on a launch of its own for rotation and KV write is faster; bits are the same


class PagedAttention:
    """Meets `frame.FrameAttention`. Rows made by it are used one traversal after the other: they share buffers."""

    def __init__(self, pool: KvPool, page_table: Tensor, heads: int, *, decode_rows: int, prompt_rows: int) -> None:
        self.pool = pool
        self.page_table = page_table
        self.heads = heads
        self.starts = pool.plane_starts
        geometry, device = pool.geometry, pool.device
        self._context_pieces = -(-page_table.shape[1] * pool.page_tokens // PIECE)
        entries = decode_rows * self._context_pieces
        self.work = allocate_work(entries, device)
        self.scratch = allocate_scratch(entries, decode_rows, heads, geometry.kv_heads, geometry.head_dim, device)
        self.prompt_work = allocate_work(-(-prompt_rows // QUERY_TILE) + MOST_CHUNKS, device)

    def rows(self, frame: Frame) -> PagedRows:
        return PagedRows(self, frame)


class PagedRows:
    """Meets `models.base.Rows`; `attend_product` is what a fused model calls instead."""

    def __init__(self, attention: PagedAttention, frame: Frame) -> None:
        self.positions, self.depths, self.noise_seeds = frame.positions, frame.depths, frame.noise_seeds
        self._attention = attention
        self._frame = frame
        self._columns: tuple[Tensor, Tensor] | None = None  # of loops, of what runs once: [3, N] int32
        self._chunks: PromptChunks | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(self._planned()[0], layer, q, k, v)

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(self._planned()[1], layer, q, k, v)

    def attend_product(self, layer: int, qkv: Tensor, turning: Turning, *, is_once: bool = False) -> Tensor:
        """As `attend` from a QKV product [N, (heads + 2 kv_heads) d] that hasn't turned yet; [N, heads * d]."""
        columns = self._planned()[is_once]
        shared, decode = self._attention, self._frame.decode_rows
        heads, pool = shared.heads, shared.pool
        out = torch.empty(len(qkv), heads * pool.geometry.head_dim, dtype=qkv.dtype, device=qkv.device)
        if decode:
            at, q, turns = self._addresses(columns[:, :decode]), qkv[:decode], decode < ROWS_TO_TURN_APART
            if not turns:
                q = rope_kv(q, heads, turning, at, pool.k, pool.v, layer)
            decode_attention(
                q,
                heads,
                at,
                shared.work,
                shared.scratch,
                pool.k,
                pool.v,
                layer,
                turning=turning if turns else None,
                out=out[:decode],
            )
        if self._chunks is not None:
            at = self._addresses(columns[:, decode:])
            q = rope_kv(qkv[decode:], heads, turning, at, pool.k, pool.v, layer)
            prompt_attention(q, heads, at, self._chunks, pool.k, pool.v, layer, out=out[decode:])
        return out

    def _attend(self, columns: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared, decode = self._attention, self._frame.decode_rows
        heads, pool = shared.heads, shared.pool
        facts = pool.facts
        write_kv(k, v, columns, shared.page_table, facts.slots_per_page, pool.k, pool.v, layer)
        flat = q.flatten(1)
        out = torch.empty_like(flat)
        if decode:
            at = self._addresses(columns[:, :decode])
            decode_attention(
                flat[:decode], heads, at, shared.work, shared.scratch, pool.k, pool.v, layer, out=out[:decode]
            )
        if self._chunks is not None:
            at = self._addresses(columns[:, decode:])
            prompt_attention(flat[decode:], heads, at, self._chunks, pool.k, pool.v, layer, out=out[decode:])
        return out.view(q.shape)

    def _addresses(self, columns: Tensor) -> RowAddresses:
        shared = self._attention
        return RowAddresses(columns[0], columns[1], columns[2], shared.page_table, shared.pool.facts.slots_per_page)

    def _planned(self) -> tuple[Tensor, Tensor]:
        if self._columns is None:
            frame, shared = self._frame, self._attention
            looped, sizes = addresses(
                frame.slots, frame.positions, frame.depths, frame.live, shared.starts, frame.decode_rows
            )
            once = torch.stack((looped[0], looped[1], torch.zeros_like(looped[2]))) if self._has_once() else looped
            if frame.decode_rows:
                list_runs(shared.work, sizes, shared.pool.geometry.kv_heads)
            if frame.prompt_rows:
                self._chunks = self._plan_chunks(frame)
            self._columns = looped, once
        return self._columns

    def _has_once(self) -> bool:
        geometry = self._attention.pool.geometry
        return geometry.layers != geometry.recurrent_layers

    def _plan_chunks(self, frame: Frame) -> PromptChunks:
        """Chunks whose first row is live; rows of a chunk are live together."""
        firsts, counts = frame.chunks[0], frame.chunks[1]
        is_live = frame.live[frame.decode_rows :][firsts]
        chunks = PromptChunks(
            firsts.to(torch.int32), torch.where(is_live, counts, 0).to(torch.int32), self._attention.prompt_work
        )
        fill_work(chunks.work, chunks.counts, QUERY_TILE)
        return chunks
