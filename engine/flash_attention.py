"""Attention over the paged pool by a FlashAttention library: how the pool looks to it, and how each is called.

Owns the view of the pool and the tables that make it one: for every layer the pool from that layer's slot on, as pages
of one slot; a row's table holds `page * slots_per_page + start(plane) - first(plane)` and serves all layers. KV is
never split (`num_splits` 1), so a row's sums don't follow from the batch. Libraries are found at run time and none is
imported before it is asked for. It must not know why a library was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from epicycle.engine.attention_choice import MODULES, AttentionChoice


@dataclass(frozen=True, slots=True)
class FlashRun:
    """Rows of one kind. K and V [slots, page_tokens, kv_heads, d]; of B sequences: `lengths` [B] int32 positions that
    hold KV (0: none) and `table` [B, pages] int32 into them. `starts` [B + 1] int32 are first rows, for prompts."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor
    starts: Tensor | None = None


class FlashLibrary(Protocol):
    def decode(self, q: Tensor, run: FlashRun) -> Tensor:
        """q [B, heads, d], one row a sequence, at its last position; [B, heads, d]. Scale d ** -0.5."""
        ...

    def prompt(self, q: Tensor, run: FlashRun) -> Tensor:
        """q [N, heads, d], sequence b's last rows from `starts[b]` on, causal; what comes after them means nothing."""
        ...


@dataclass(frozen=True, slots=True)
class FlashParts:
    """The libraries of decode and prompt rows; None where other kernels do it."""

    decode: FlashLibrary | None = None
    prompt: FlashLibrary | None = None


def layer_view(pool: Tensor, layer: int) -> Tensor:
    """[slots - layer, page_tokens, kv_heads, d]: a table's number n is slot n of it, whatever the layer."""
    return pool[layer:]


def slot_tables(slots: Tensor, plane_slots: Tensor, page_table: Tensor, slots_per_page: int) -> Tensor:
    """[B, pages] int32 from the slots [B] (below 0: nobody) and `start(plane) - first(plane)` [B] of rows."""
    pages = page_table[slots.clamp(min=0).to(torch.int64)]
    return (pages * slots_per_page + plane_slots.unsqueeze(1)).to(torch.int32)


def load_flash(choice: AttentionChoice) -> FlashParts:
    """The libraries that a choice names."""
    made: dict[str, FlashLibrary] = {}
    for name in {choice.decode, choice.prompt} & set(MODULES):
        made[name] = _ADAPTERS[name](import_module(MODULES[name]))
    return FlashParts(made.get(choice.decode), made.get(choice.prompt))


class _Fa2:
    """flash-attn 2.8."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def decode(self, q: Tensor, run: FlashRun) -> Tensor:
        out: Tensor = self._module.flash_attn_with_kvcache(
            q.unsqueeze(1), run.k, run.v, cache_seqlens=run.lengths, block_table=run.table, causal=True, num_splits=1
        )
        return out.squeeze(1)

    def prompt(self, q: Tensor, run: FlashRun) -> Tensor:
        ends = torch.nn.functional.pad(run.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        most_keys = run.table.shape[1] * run.k.shape[1]
        out: Tensor = self._module.flash_attn_varlen_func(
            q, run.k, run.v, run.starts, ends, len(q), most_keys, causal=True, block_table=run.table
        )
        return out


class _Fa3:
    """The module that a build of FlashAttention's hopper folder installs."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def decode(self, q: Tensor, run: FlashRun) -> Tensor:
        return self._call(q.unsqueeze(1), run).squeeze(1)

    def prompt(self, q: Tensor, run: FlashRun) -> Tensor:
        return self._call(q, run, cu_seqlens_q=run.starts, max_seqlen_q=len(q))

    def _call(self, q: Tensor, run: FlashRun, **more: object) -> Tensor:
        out: Tensor = self._module.flash_attn_with_kvcache(
            q, run.k, run.v, cache_seqlens=run.lengths, page_table=run.table, causal=True, num_splits=1, **more
        )
        return out


class _Fa4:
    """flash-attn-4."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def decode(self, q: Tensor, run: FlashRun) -> Tensor:
        rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return self._call(q, run, rows, 1)

    def prompt(self, q: Tensor, run: FlashRun) -> Tensor:
        assert run.starts is not None
        return self._call(q, run, run.starts, len(q))

    def _call(self, q: Tensor, run: FlashRun, starts: Tensor, most_rows: int) -> Tensor:
        out: Tensor
        out, _ = self._module.flash_attn_varlen_func(
            q, run.k, run.v, cu_seqlens_q=starts, max_seqlen_q=most_rows, seqused_k=run.lengths, page_table=run.table,
            causal=True, num_splits=1,
        )  # fmt: skip
        return out


_ADAPTERS: dict[str, Callable[[Any], FlashLibrary]] = {"fa2": _Fa2, "fa3": _Fa3, "fa4": _Fa4}
