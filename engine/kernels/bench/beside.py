"""Ticks of decode rows beside prompt rows for the kernel benchmark: attention of both, and whole loops around it.

Owns the three ways in which the two kernels can be launched: one after the other, on streams of their own, and with the
multiprocessors shared out between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epicycle.engine.kernels.bench.loops import Attend, Core, Loop, Pick, Turn
from epicycle.engine.kernels.bench.rows import PAGE_TOKENS, make_pool, make_rows, make_turning
from epicycle.engine.kernels.bench.shapes import Shape
from epicycle.engine.kernels.decode_attention_triton import PIECE, allocate_scratch, decode_attention, list_runs
from epicycle.engine.kernels.graph_times import graphs_us, sustained_us
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention, item_rows
from epicycle.engine.kernels.products import GemmConfig
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, rope_kv
from epicycle.engine.kernels.runs_triton import Runs, allocate_runs
from epicycle.engine.kernels.share_triton import share_out
from epicycle.engine.kernels.spans import pack_spans, span_columns
from epicycle.engine.kernels.triton_common import multiprocessors
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places
from epicycle.engine.kernels.wide_triton import turn_product
from epicycle.engine.side_stream import SideStream

FORMS = ("in turn", "forked", "shared")


@dataclass(frozen=True, slots=True)
class Tick:
    """Histories of decode rows, their own position included, and chunks (first position, rows)."""

    lengths: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return len(self.lengths) + sum(count for _, count in self.chunks)


class Beside:
    """Buffers of one tick; KV of four layers, so that no cache holds it."""

    LAYERS = 4

    def __init__(self, shape: Shape, tick: Tick) -> None:
        self.shape, self.tick, self.decode = shape, tick, len(tick.lengths)
        device = torch.device("cuda", torch.cuda.current_device())
        spans = [*((length - 1, 1) for length in tick.lengths), *tick.chunks]
        pages = [-(-(first + count) // PAGE_TOKENS) for first, count in spans]
        self.pool = make_pool(shape, sum(pages), self.LAYERS)
        slots, positions = span_columns(spans, device)
        self.all_rows = make_rows(self.pool, slots, positions, len(spans), PAGE_TOKENS * max(pages))
        self.turning = make_turning(shape, PAGE_TOKENS * max(pages))
        tile = item_rows(tick.rows - self.decode, shape.heads, device)
        self.chunks, starts = pack_spans(tick.chunks, tile, device)
        sizes = torch.tensor(tick.lengths, dtype=torch.int32, device="cuda")
        pieces = sum(-(-length // PIECE) for length in tick.lengths)
        self.share = share_out(
            sizes, starts, self.chunks.counts, tile, shape.heads, shape.kv_heads, multiprocessors(device)
        )
        self.whole, self.part = allocate_runs(pieces, device), allocate_runs(pieces, device)
        list_runs(self.whole, sizes, shape.kv_heads, shape.head_dim)
        list_runs(self.part, sizes, shape.kv_heads, shape.head_dim, share=self.share)
        self.scratch = allocate_scratch(pieces, self.decode, shape.heads, shape.kv_heads, shape.head_dim, device)
        self.side = SideStream(device)
        self.q = torch.empty(tick.rows, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")

    def rows(self, at: slice) -> RowAddresses:
        held = self.all_rows
        return replace(held, slots=held.slots[at], positions=held.positions[at], plane_slots=held.plane_slots[at])

    def attend(self, form: str) -> Attend:
        """Attention of all rows from q that has turned, or with Huginn from the QKV product."""
        out = torch.empty_like(self.q)
        decode, prompts = slice(self.decode), slice(self.decode, None)

        def attend(qkv: Tensor, layer: int) -> Tensor:
            at = layer % self.LAYERS
            q, prompt_q = self._turned(qkv[decode], decode, at), self._turned(qkv[prompts], prompts, at)
            prompt = partial(self._prompt, prompt_q, out[prompts], at)
            if form == "forked":
                with self.side.forked():
                    prompt(None)
                self._decode(q, out[decode], at, self.whole)
                self.side.join()
            else:
                is_shared = form == "shared"
                prompt(self.share if is_shared else None)
                self._decode(q, out[decode], at, self.part if is_shared else self.whole, beside=is_shared)
            return out

        return attend

    def alone(self, which: str, q: Tensor, layer: int) -> None:
        """Decode rows or prompts, and nobody beside them; `q` has turned."""
        out, decode = torch.empty_like(q), self.decode
        if which == "decode":
            self._decode(q[:decode], out[:decode], layer, self.whole)
        else:
            self._prompt(q[decode:], out[decode:], layer, None)

    def turn(self, config: GemmConfig) -> Turn:
        """QKV products that turn all rows."""
        places = find_places(self.all_rows, self.turning, PAGE_TOKENS)

        def turn(x: Tensor, weight: Tensor, layer: int) -> Tensor:
            to = TurnedRows(self.q, self.pool.k, self.pool.v, places, layer % self.LAYERS)
            return turn_product(x, weight, config, to)

        return turn

    def _turned(self, qkv: Tensor, at: slice, layer: int) -> Tensor:
        if not self.shape.pairs:
            return qkv
        return rope_kv(qkv, self.shape.heads, self.turning, self.rows(at), self.pool.k, self.pool.v, layer)

    def _prompt(self, q: Tensor, out: Tensor, layer: int, share: Tensor | None) -> None:
        rows = self.rows(slice(self.decode, None))
        common = q, self.shape.heads, rows, self.chunks, self.pool.k, self.pool.v, layer
        hopper_prompt_attention(*common, out=out, share=share)

    def _decode(self, q: Tensor, out: Tensor, layer: int, work: Runs, *, beside: bool = False) -> None:
        rows = self.rows(slice(self.decode))
        common = q, self.shape.heads, rows, work, self.scratch, self.pool.k, self.pool.v, layer
        decode_attention(*common, out=out, beside=beside)


def time_beside(shape: Shape, core: Core, pick: Pick, turn: GemmConfig | None, tick: Tick) -> dict[str, Any]:
    """Microseconds of a layer's attention in every form, and of whole loops in turn and sustained, twice."""
    beside = Beside(shape, tick)
    width = shape.heads * shape.head_dim * (3 if shape.pairs else 1)
    q = torch.randn(tick.rows, width, dtype=torch.bfloat16, device="cuda")
    layers: dict[str, list[Callable[[], object]]] = {}
    for form in FORMS:
        attend = beside.attend(form)
        layers[form] = [partial(attend, q, layer) for layer in range(beside.LAYERS)]
    outs = {form: launches[0]() for form, launches in layers.items()}
    for which in ("decode", "prompt"):
        turned = q[:, : shape.heads * shape.head_dim].contiguous()
        layers[which] = [partial(beside.alone, which, turned, layer) for layer in range(beside.LAYERS)]
    loops: dict[str, list[Callable[[], object]]] = {
        form: [Loop(core, tick.rows, pick, beside.attend(form), beside.turn(turn) if turn is not None else None)]
        for form in FORMS[1:]
    }
    equal = all(torch.equal(outs[FORMS[0]], out) for out in outs.values())  # type: ignore[arg-type]
    return {
        "rows": [len(tick.lengths), max(tick.lengths), *tick.chunks],
        "shares": beside.share.tolist(),
        "equal": equal,
        "attention_us": graphs_us(layers),
        "loop_us": graphs_us(loops),
        "loop_sustained_us": sustained_us(loops),
    }
