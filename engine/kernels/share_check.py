"""Whether prompt and decode attention that share the card out have the bits they have one after the other.

Owns one comparison, made a few times once for a shape: rows of many lengths beside chunks that begin anywhere, with a
share for decode rows that is too small for all of their programs, so that some come when others have gone. Where a bit
differs, or a launch is refused, the card isn't shared out. It must not know pools or ticks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from epicycle.engine.kernels.decode_attention_triton import PIECE, allocate_scratch, decode_attention, list_runs
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention, item_rows
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.runs_triton import allocate_runs
from epicycle.engine.kernels.share_triton import share_out
from epicycle.engine.kernels.spans import pack_spans, span_columns
from epicycle.engine.kernels.triton_common import multiprocessors, starts_early

LENGTHS = (1, 17, 127, 128, 129, 300, 700, 1100, 1100, 1500, 2049) * 2
CHUNKS = ((0, 300), (130, 129), (700, 1), (1024, 600), (0, 40), (3, 90))
"""First position and rows."""
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
        return _is_equal(heads, kv_heads, width, page_tokens, dtype, device)
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return False


def _is_equal(
    heads: int, kv_heads: int, width: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    generator = torch.Generator(device).manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    decode, programs = len(LENGTHS), multiprocessors(device)
    spans = [*((length - 1, 1) for length in LENGTHS), *CHUNKS]
    pages = [-(-(first + count) // page_tokens) for first, count in spans]
    shuffled = torch.randperm(sum(pages), device=device, generator=generator, dtype=torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(list(torch.split(shuffled, pages)), batch_first=True)
    size = sum(pages), page_tokens, kv_heads, width
    k, v = normal(*size), normal(*size)
    slots, positions = span_columns(spans, device)
    planes, q = torch.zeros_like(slots), normal(len(slots), heads * width)

    def rows(at: slice) -> RowAddresses:
        return RowAddresses(slots[at], positions[at], planes[at], table, 1)

    tile = item_rows(len(slots) - decode, heads, device)
    chunks, starts = pack_spans(CHUNKS, tile, device)
    sizes, pieces = column(list(LENGTHS)), sum(-(-length // PIECE) for length in LENGTHS)
    scratch = allocate_scratch(pieces, decode, heads, kv_heads, width, device)

    def attend(share: Tensor | None) -> Tensor:
        work, out = allocate_runs(pieces, device), torch.full_like(q, float("nan"))
        list_runs(work, sizes, kv_heads, width, share=share)
        prompts, others = slice(decode, None), slice(decode)
        hopper_prompt_attention(q[prompts], heads, rows(prompts), chunks, k, v, 0, out=out[prompts], share=share)
        is_beside = share is not None
        decode_attention(q[others], heads, rows(others), work, scratch, k, v, 0, out=out[others], beside=is_beside)
        return out

    expected = attend(None)
    shares = [share_out(sizes, starts, chunks.counts, tile, heads, kv_heads, programs), column([programs - 4, 4])]
    return all(torch.equal(expected, attend(share)) for _ in range(TIMES) for share in shares)
