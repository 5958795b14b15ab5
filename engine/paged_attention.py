"""Attention of a device tick's rows through the GPU kernels, without a host value.

Owns the device metadata that the kernels take (addresses, work lists) and their buffers, made once for the largest
tick. A traversal's metadata is made when a layer first asks and serves all its layers. Rows that aren't live read and
write nothing, and what comes out for them means nothing. Decode rows, prompt rows or both may go to a FlashAttention
library instead; KV is always written by our kernels. It must not know how rows were chosen.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.flash_attention import FlashParts, FlashRun, layer_view, slot_tables
from epicycle.engine.frame import Frame
from epicycle.engine.kernels.candidates import EARLY_ROWS
from epicycle.engine.kernels.decode_attention_triton import PIECE, allocate_scratch, decode_attention, list_runs
from epicycle.engine.kernels.early_check import early_holds
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention, item_rows
from epicycle.engine.kernels.prompt_attention_triton import QUERY_TILE, PromptChunks, prompt_attention, query_tile
from epicycle.engine.kernels.prompt_check import hopper_prompt_holds
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.runs_triton import allocate_runs
from epicycle.engine.kernels.share_check import share_holds
from epicycle.engine.kernels.share_triton import share_out
from epicycle.engine.kernels.tick_triton import addresses, write_kv
from epicycle.engine.kernels.triton_common import multiprocessors, starts_early
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.kernels.turned_triton import Places, TurnedRows, find_places
from epicycle.engine.kernels.work_triton import allocate_work, list_tiles
from epicycle.engine.pool import KvPool
from epicycle.engine.side_stream import SideStream
from epicycle.engine.tick_inputs import MOST_CHUNKS

ROWS_TO_TURN_APART = 48  # from here on a launch of its own for rotation and KV write is faster; bits are the same
# Where prompt and decode attention don't share the multiprocessors out, they run on streams of their own if prompts
# have so many programs for each, or little to read: a few long ones would crowd on those that are free first.
PROGRAMS_TO_FORK = 1.5
CONTEXT_TO_FORK = 4096


class PagedAttention:
    """Meets `frame.FrameAttention`. Rows made by it are used one traversal after the other: they share buffers."""

    def __init__(
        self,
        pool: KvPool,
        page_table: Tensor,
        heads: int,
        *,
        decode_rows: int,
        prompt_rows: int,
        flash: FlashParts | None = None,
        turns_pairs: bool | None = None,
    ) -> None:
        """`turns_pairs` is the convention by which `attend_product` rotates; None where nobody calls it."""
        self.pool = pool
        self.flash = flash or FlashParts()
        self.page_table = page_table
        self.heads = heads
        self.starts = pool.plane_starts
        geometry, device = pool.geometry, pool.device
        self.context_tokens = page_table.shape[1] * pool.page_tokens
        self._context_pieces = -(-self.context_tokens // PIECE)
        entries = decode_rows * self._context_pieces
        self.work = allocate_runs(entries, device)
        self.scratch = allocate_scratch(entries, decode_rows, heads, geometry.kv_heads, geometry.head_dim, device)
        self._listed: tuple[Tensor, Tensor] | None = None  # positions and live rows of the last work list
        shape = heads, geometry.kv_heads, geometry.head_dim, pool.page_tokens
        self.reads_ahead = turns_pairs is not None and early_holds(*shape, turns_pairs, pool.k.dtype, device)
        self.side = SideStream(device)
        self.is_hopper = self.flash.prompt is None and hopper_prompt_holds(*shape, pool.k.dtype, device)
        takes_both = self.is_hopper and self.flash.decode is None
        self.shares_card = takes_both and share_holds(*shape, pool.k.dtype, device)
        self.prompt_work = allocate_work(-(-prompt_rows // QUERY_TILE) + MOST_CHUNKS, device)

    def line(self) -> str:
        """Which of the faster kernels serve: those that the options allow, that this card has, and whose bits held when
        they were checked."""
        parts = {
            "Hopper's for prompts": self.is_hopper,
            "card shared with decode rows": self.shares_card,
            "lone rows read ahead": self.reads_ahead,
        }
        return "attention kernels: " + ", ".join(f"{name} {'yes' if is_on else 'no'}" for name, is_on in parts.items())

    def rows(self, frame: Frame) -> PagedRows:
        return PagedRows(self, frame)

    def forks(self, decode_rows: int, prompt_rows: int) -> bool:
        """Whether prompt rows are attended to on a stream of their own, beside decode rows."""
        # Few rows' next product may start early, and that takes one launch before it, not two.
        if self.shares_card or not decode_rows or decode_rows + prompt_rows <= EARLY_ROWS:
            return False
        if self.context_tokens <= CONTEXT_TO_FORK:
            return prompt_rows > 0
        programs = prompt_rows // self.item_rows(prompt_rows) * self.heads
        return programs >= PROGRAMS_TO_FORK * multiprocessors(self.pool.device)

    def item_rows(self, prompt_rows: int) -> int:
        """Rows of one work item of prompt attention in a tick that has so many."""
        if self.is_hopper:
            return item_rows(prompt_rows, self.heads, self.pool.device)
        return query_tile(prompt_rows, self.context_tokens, self.pool.geometry.head_dim)

    def has_listed(self, frame: Frame) -> bool:
        """The work list is that of these rows already: deeper loops of a token read as far as its first. If not, the
        caller lists them now."""
        rows = frame.positions, frame.live
        is_same = self._listed is not None and all(one is other for one, other in zip(self._listed, rows, strict=True))
        self._listed = rows
        return is_same


@dataclass(frozen=True, slots=True)
class _Flash:
    """What a library's calls of one traversal share; tables are those of `slot_tables`."""

    lengths: Tensor
    table: Tensor
    starts: Tensor | None = None

    def run(self, pool: KvPool, layer: int) -> FlashRun:
        return FlashRun(layer_view(pool.k, layer), layer_view(pool.v, layer), self.lengths, self.table, self.starts)


class PagedRows:
    """Meets `models.base.Rows`; `attend_product` is what a fused model calls instead."""

    def __init__(self, attention: PagedAttention, frame: Frame) -> None:
        self.positions, self.depths, self.noise_seeds = frame.positions, frame.depths, frame.noise_seeds
        self._attention = attention
        self._frame = frame
        self._columns: tuple[Tensor, Tensor] | None = None  # of loops, of what runs once: [3, N] int32
        self._chunks: PromptChunks | None = None
        self._share: Tensor | None = None  # see `share_triton`; None where the card isn't shared out
        self._flash: dict[tuple[bool, bool], _Flash] = {}  # by (is prompt, is once)
        self._places: dict[bool, Places] = {}  # by is once

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, is_once=False)

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, is_once=True)

    def project(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
        turning: Turning,
        ops: TritonOps,
        count: Tensor | None = None,
        *,
        is_once: bool = False,
    ) -> tuple[Tensor, Turning | None]:
        """What `attend_product` takes: beside prompts a product of many rows may turn and write them all itself."""
        shared, pool = self._attention, self._attention.pool
        config = ops.find_turned(weight, len(x)) if self._frame.prompt_rows and count is None else None
        if config is None:
            return ops.product(x, weight, count=count), turning
        if is_once not in self._places:
            self._places[is_once] = find_places(self._addresses(self._planned()[is_once]), turning, pool.page_tokens)
        q = torch.empty(len(x), shared.heads * pool.geometry.head_dim, dtype=x.dtype, device=x.device)
        return ops.turn(x, weight, config, TurnedRows(q, pool.k, pool.v, self._places[is_once], layer)), None

    def attend_product(self, layer: int, qkv: Tensor, turning: Turning | None, *, is_once: bool = False) -> Tensor:
        """As `attend` from a QKV product [N, (heads + 2 kv_heads) d] that hasn't turned yet; [N, heads * d]. Without
        `turning` from q alone, turned, with k and v written."""
        is_planned = self._columns is not None
        columns = self._planned()[is_once]
        shared, decode = self._attention, self._frame.decode_rows
        heads, pool = shared.heads, shared.pool
        # The first launch of a traversal comes behind those that list its work.
        early = is_planned and decode == len(qkv) and starts_early(qkv.device, decode)
        out = torch.empty(len(qkv), heads * pool.geometry.head_dim, dtype=qkv.dtype, device=qkv.device)
        q, prompt_q, inside = qkv[:decode], qkv[decode:], turning
        if turning is not None and decode and (decode >= ROWS_TO_TURN_APART or shared.flash.decode is not None):
            at = self._addresses(columns[:, :decode])
            q, inside = rope_kv(q, heads, turning, at, pool.k, pool.v, layer, early=early), None
        is_apart = shared.forks(decode, len(prompt_q))
        with shared.side.forked() if is_apart else nullcontext():
            if self._chunks is not None:
                if turning is not None:
                    at = self._addresses(columns[:, decode:])
                    prompt_q = rope_kv(prompt_q, heads, turning, at, pool.k, pool.v, layer)
                self._prompt(prompt_q, layer, out[decode:], is_once=is_once)
        if decode:  # right behind prompts, if it is to run beside them
            self._decode(q, layer, out[:decode], is_once=is_once, turning=inside, early=early)
        if is_apart:
            shared.side.join()
        return out

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, is_once: bool) -> Tensor:
        columns = self._planned()[is_once]
        shared, decode = self._attention, self._frame.decode_rows
        pool = shared.pool
        write_kv(k, v, columns, shared.page_table, pool.facts.slots_per_page, pool.k, pool.v, layer)
        flat = q.flatten(1)
        out = torch.empty_like(flat)
        if self._chunks is not None:
            self._prompt(flat[decode:], layer, out[decode:], is_once=is_once)
        if decode:  # right behind prompts, as above
            self._decode(flat[:decode], layer, out[:decode], is_once=is_once)
        return out.view(q.shape)

    def _decode(
        self,
        q: Tensor,
        layer: int,
        out: Tensor,
        *,
        is_once: bool,
        turning: Turning | None = None,
        early: bool = False,
    ) -> None:
        """Into `out` [B, heads * d]; q has turned, or with `turning` is the product that hasn't."""
        shared = self._attention
        pool = shared.pool
        if shared.flash.decode is not None:
            run = self._flash_of(is_prompt=False, is_once=is_once).run(pool, layer)
            out.copy_(shared.flash.decode.decode(self._by_heads(q), run).flatten(1))
            return
        at = self._addresses(self._planned()[is_once][:, : self._frame.decode_rows])
        decode_attention(
            q, shared.heads, at, shared.work, shared.scratch, pool.k, pool.v, layer, turning=turning, out=out,
            early=early, ahead=early and len(q) == 1 and turning is not None and shared.reads_ahead,
            beside=self._share is not None,
        )  # fmt: skip

    def _prompt(self, q: Tensor, layer: int, out: Tensor, *, is_once: bool) -> None:
        """Into `out` [N, heads * d]."""
        shared = self._attention
        pool = shared.pool
        if shared.flash.prompt is not None:
            run = self._flash_of(is_prompt=True, is_once=is_once).run(pool, layer)
            out.copy_(shared.flash.prompt.prompt(self._by_heads(q), run).flatten(1))
            return
        assert self._chunks is not None
        at = self._addresses(self._planned()[is_once][:, self._frame.decode_rows :])
        common = q, shared.heads, at, self._chunks, pool.k, pool.v, layer
        if shared.is_hopper:
            hopper_prompt_attention(*common, out=out, share=self._share)
        else:
            prompt_attention(*common, out=out)

    def _by_heads(self, q: Tensor) -> Tensor:
        return q.view(len(q), self._attention.heads, -1)

    def _flash_of(self, *, is_prompt: bool, is_once: bool) -> _Flash:
        """Made when the first layer asks. A chunk's rows have one slot, plane and end: those of its first."""
        key = is_prompt, is_once
        if key not in self._flash:
            frame, shared, columns, chunks = self._frame, self._attention, self._planned()[is_once], self._chunks
            lengths, starts = torch.where(frame.live, frame.ends, 0).to(torch.int32), None
            rows: slice | Tensor = slice(frame.decode_rows)
            if is_prompt:
                assert chunks is not None
                rows = chunks.firsts.to(torch.int64) + frame.decode_rows
                lengths = torch.where(chunks.counts > 0, lengths[rows], 0)
                starts = torch.nn.functional.pad(chunks.counts.cumsum(0, dtype=torch.int32), (1, 0))
            else:
                lengths = lengths[rows]
            slots_per_page = shared.pool.facts.slots_per_page
            table = slot_tables(columns[0][rows], columns[2][rows], shared.page_table, slots_per_page)
            self._flash[key] = _Flash(lengths, table, starts)
        return self._flash[key]

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
            if frame.prompt_rows:
                self._chunks, starts = self._plan_chunks(frame)
                if frame.decode_rows and shared.shares_card:
                    self._share = self._share_out(sizes, starts, self._chunks)
            if frame.decode_rows and not shared.has_listed(frame):
                geometry, ahead = shared.pool.geometry, shared.reads_ahead and len(frame.slots) == 1
                list_runs(shared.work, sizes, geometry.kv_heads, geometry.head_dim, ahead=ahead, share=self._share)
            self._columns = looped, once
        return self._columns

    def _has_once(self) -> bool:
        geometry = self._attention.pool.geometry
        return geometry.layers != geometry.recurrent_layers

    def _share_out(self, sizes: Tensor, starts: Tensor, chunks: PromptChunks) -> Tensor:
        shared, card = self._attention, multiprocessors(sizes.device)
        kv_heads = shared.pool.geometry.kv_heads
        return share_out(sizes, starts, chunks.counts, chunks.query_tile, shared.heads, kv_heads, card)

    def _plan_chunks(self, frame: Frame) -> tuple[PromptChunks, Tensor]:
        """Chunks whose first row is live, and where they begin, [C] int32; rows of a chunk are live together."""
        firsts, counts = frame.chunks[0], frame.chunks[1]
        is_live = frame.live[frame.decode_rows :][firsts]
        starts = frame.positions[frame.decode_rows :][firsts].to(torch.int32)
        counts = torch.where(is_live, counts, 0).to(torch.int32)
        shared = self._attention
        tile = shared.item_rows(frame.prompt_rows)
        chunks = PromptChunks(firsts.to(torch.int32), counts, shared.prompt_work, tile)
        list_tiles(chunks.work, chunks.counts, starts, tile)
        return chunks, starts
