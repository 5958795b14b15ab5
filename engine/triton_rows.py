"""The rows of one traversal on a GPU: the same view as `rows.TickRows`, its attention through the Triton kernels.

Owns the device metadata that the attention kernels take: addresses of the rows, and the work lists of decode rows and
of prompt chunks, made when a layer first asks and then shared by every layer of the traversal. Eager: it reads run
lengths back to the host. Decode rows come first, then prompt rows, then padding, as `rows.RowLayout` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.decode_attention_triton import (
    PIECE,
    DecodeScratch,
    allocate_scratch,
    decode_attention,
    list_runs,
)
from epicycle.engine.kernels.prompt_attention_triton import QUERY_TILE, PromptChunks, prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.work_triton import WorkList, allocate_work, fill_work
from epicycle.engine.pool import KvPool
from epicycle.engine.rows import RowLayout


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: RowAddresses
    writes: Tensor  # [live] int64 cells of layer 0
    work: WorkList | None  # of the decode rows
    scratch: DecodeScratch | None
    chunks: PromptChunks | None


class TritonRows:
    """Meets `models.base.Rows` over a `KvPool` on a GPU. `page_table` [slots, pages a request can have] int32."""

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
            self._loop_plan = self._plan(self._pool.planes_of(self.layout.depths), q.shape[1])
        return self._attend(self._loop_plan, layer, q, k, v)

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._once_plan is None:
            self._once_plan = self._plan(torch.zeros_like(self.layout.depths), q.shape[1])
        return self._attend(self._once_plan, layer, q, k, v)

    def _attend(self, plan: _Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        live, heads, pool = self.layout.live_rows, q.shape[1], self._pool
        pool.write(plan.writes, layer, k[:live], v[:live])
        flat = q.flatten(1)
        out = torch.zeros(flat.shape, dtype=q.dtype, device=q.device)
        if plan.work is not None:
            assert plan.scratch is not None
            decode_attention(flat, heads, plan.rows, plan.work, plan.scratch, pool.k, pool.v, layer, out=out)
        if plan.chunks is not None:
            prompt_attention(flat, heads, plan.rows, plan.chunks, pool.k, pool.v, layer, out=out)
        return out.view(q.shape)

    def _plan(self, planes: Tensor, heads: int) -> _Plan:
        layout, facts, live = self.layout, self._pool.facts, self.layout.live_rows
        offsets = [start - first for start, first in zip(facts.starts, facts.firsts, strict=True)]
        plane_slots = torch.tensor(offsets, dtype=torch.int32, device=planes.device)[planes].contiguous()
        slots = layout.slots.to(torch.int32, memory_format=torch.contiguous_format, copy=True)
        slots[live:] = -1  # padding carries row 0's metadata and owns no KV
        positions = layout.positions.to(torch.int32, memory_format=torch.contiguous_format)
        rows = RowAddresses(slots, positions, plane_slots, self._page_table, facts.slots_per_page)
        alive = RowAddresses(slots[:live], positions[:live], plane_slots[:live], self._page_table, facts.slots_per_page)
        work, scratch = self._decode_work(positions, heads)
        return _Plan(rows, alive.cells(0, facts.page_tokens), work, scratch, self._prompt_chunks(slots))

    def _decode_work(self, positions: Tensor, heads: int) -> tuple[WorkList | None, DecodeScratch | None]:
        count, geometry = self.layout.decode_rows, self._pool.geometry
        if not count:
            return None, None
        lengths = positions[:count] + 1
        entries = int(((lengths + PIECE - 1) // PIECE).sum())
        work = allocate_work(entries, positions.device)
        list_runs(work, lengths, geometry.kv_heads)
        scratch = allocate_scratch(entries, count, heads, geometry.kv_heads, geometry.head_dim, positions.device)
        return work, scratch

    def _prompt_chunks(self, slots: Tensor) -> PromptChunks | None:
        """Runs of equal slots among the prompt rows."""
        first, live = self.layout.decode_rows, self.layout.live_rows
        if first == live:
            return None
        prompt = slots[first:live]
        begins = torch.ones_like(prompt, dtype=torch.bool)
        begins[1:] = prompt[1:] != prompt[:-1]
        firsts = begins.nonzero().squeeze(1)
        counts = torch.diff(firsts, append=firsts.new_tensor([live - first])).to(torch.int32)
        work = allocate_work(int(((counts + QUERY_TILE - 1) // QUERY_TILE).sum()), slots.device)
        fill_work(work, counts, QUERY_TILE)
        return PromptChunks((firsts + first).to(torch.int32), counts, work)
