"""Whether prompt and decode attention that share the card out have the bits they have one after the other.

Owns one comparison, made a few times once for a shape: rows of many lengths beside chunks that begin anywhere, in items
of either size, with a share for decode rows that is too small for all of their programs, so that some come when others
have gone. Where a bit differs, or a launch is refused, the card isn't shared out. It must not know pools or ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from epicycle.engine.kernels.decode_attention_triton import (
    FEW_ROWS,
    PIECE,
    allocate_scratch,
    decode_attention,
    list_runs,
)
from epicycle.engine.kernels.hopper_prompt_triton import ROWS, hopper_prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.runs_triton import allocate_runs
from epicycle.engine.kernels.share_triton import share_out
from epicycle.engine.kernels.spans import normals, pack_spans, span_columns
from epicycle.engine.kernels.triton_common import multiprocessors, starts_early

LENGTHS = (1, 17, 127, 128, 129, 300, 700, 1100, 1100, 1500, 2049) * 2
CHUNKS = ((0, 300), (130, 129), (700, 1), (1024, 600), (0, 40), (3, 90))
"""First position and rows."""
CASES = tuple(zip(ROWS, (LENGTHS[-FEW_ROWS:], LENGTHS), strict=True))
"""Rows of an item of prompts, and lengths of the decode rows beside them."""
TIMES = 8


@cache
def share_holds(
    heads: int, kv_heads: int, width: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True where the card may be shared out; prompt attention for Hopper must hold. Uses a few hundred MiB and waits
    for the device."""
    if not starts_early(device):
        return False
    try:
        return all(_is_equal(Both(heads, kv_heads, width, page_tokens, dtype, device, *case)) for case in CASES)
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return False


def _is_equal(both: Both) -> bool:
    expected = both.attend(None)
    return all(torch.equal(expected, both.attend(share)) for _ in range(TIMES) for share in both.shares)


class Both:
    """Decode rows and prompts of one of `CASES`, and `shares` of the card by which both are attended to at once."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        item_rows: int,
        lengths: Sequence[int],
    ) -> None:
        generator = torch.Generator(device).manual_seed(heads)
        normal = normals(generator, dtype)
        self._shape = heads, kv_heads, width
        self._decode, programs = len(lengths), multiprocessors(device)
        spans = [*((length - 1, 1) for length in lengths), *CHUNKS]
        pages = [-(-(first + count) // page_tokens) for first, count in spans]
        shuffled = torch.randperm(sum(pages), device=device, generator=generator, dtype=torch.int32)
        self._table = torch.nn.utils.rnn.pad_sequence(list(torch.split(shuffled, pages)), batch_first=True)
        size = sum(pages), page_tokens, kv_heads, width
        self._k, self._v = normal(*size), normal(*size)
        self._slots, self._positions = span_columns(spans, device)
        self._planes, self._q = torch.zeros_like(self._slots), normal(len(self._slots), heads * width)
        self._chunks, starts = pack_spans(CHUNKS, item_rows, device)
        self._sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
        self._pieces = sum(-(-length // PIECE) for length in lengths)
        self._scratch = allocate_scratch(self._pieces, self._decode, heads, kv_heads, width, device)
        own = share_out(self._sizes, starts, self._chunks.counts, item_rows, heads, kv_heads, programs)
        self.shares = own, torch.tensor([programs - 4, 4], dtype=torch.int32, device=device)

    def attend(self, share: Tensor | None) -> Tensor:
        """Of all rows [N, heads * d]; without `share` one after the other."""
        heads, kv_heads, width = self._shape
        work, out = allocate_runs(self._pieces, self._q.device), torch.full_like(self._q, float("nan"))
        list_runs(work, self._sizes, kv_heads, width, share=share)
        rows = slice(self._decode, None)
        hopper_prompt_attention(
            self._q[rows], heads, self._rows(rows), self._chunks, self._k, self._v, 0, out=out[rows], share=share
        )  # fmt: skip
        rows = slice(self._decode)
        decode_attention(
            self._q[rows], heads, self._rows(rows), work, self._scratch, self._k, self._v, 0, out=out[rows],
            beside=share is not None,
        )  # fmt: skip
        return out

    def _rows(self, at: slice) -> RowAddresses:
        return RowAddresses(self._slots[at], self._positions[at], self._planes[at], self._table, 1)
