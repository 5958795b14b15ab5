"""Whether early attention gives the bits of its twin on this card, with this compiler.

Owns one comparison, made once for a shape: both kernels add up a tile in the order that their layouts give, and the
twin's layouts are the compiler's choice. Where they differ the early one isn't used. Sums of pieces are compared as
they are, in float32: results are rounded, and hide all but one in thousands of differences in a last bit. It must not
know pools or ticks.
"""

from __future__ import annotations

from functools import cache

import torch

from epicycle.engine.kernels.decode_attention_triton import PIECE, allocate_scratch, decode_attention, list_runs
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning
from epicycle.engine.kernels.runs_triton import allocate_runs
from epicycle.engine.kernels.spans import normals
from epicycle.engine.kernels.triton_common import starts_early

LENGTHS = (1, PIECE - 1, 2 * PIECE + 1, 20 * PIECE + 7)
"""Of a row's history: one piece, several, and more than are added up at once."""


@cache
def early_holds(
    heads: int, kv_heads: int, width: int, page_tokens: int, pairs: bool, dtype: torch.dtype, device: torch.device
) -> bool:
    """True where a lone row may use early attention; `pairs` is its rotation's convention. Uses a few MiB and waits for
    the device."""
    if not starts_early(device):
        return False
    try:
        return all(_is_equal(heads, kv_heads, width, page_tokens, length, pairs, dtype, device) for length in LENGTHS)
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return False


def _is_equal(
    heads: int,
    kv_heads: int,
    width: int,
    page_tokens: int,
    length: int,
    pairs: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    generator = torch.Generator(device).manual_seed(length)
    normal = normals(generator, dtype)

    pages = -(-length // page_tokens)
    pools = normal(pages, page_tokens, kv_heads, width), normal(pages, page_tokens, kv_heads, width)
    angles = torch.rand(length, width // 2 if pairs else width, device=device, generator=generator) * 6
    turn_dtype = torch.float32 if pairs else dtype
    bias = normal(2, heads * width) if pairs and heads == kv_heads else None
    turning = Turning(angles.cos().to(turn_dtype), angles.sin().to(turn_dtype), pairs, bias)
    table = torch.arange(pages, dtype=torch.int32, device=device).flip(0).view(1, pages)
    at = torch.tensor([[0], [length - 1], [0]], dtype=torch.int32, device=device)
    rows = RowAddresses(at[0], at[1], at[2], table, 1)
    pieces = -(-length // PIECE)
    work = allocate_runs(pieces, device)
    list_runs(work, at[1] + 1, kv_heads, width, ahead=True)
    scratch = allocate_scratch(pieces, 1, heads, kv_heads, width, device)
    qkv = normal(1, (heads + 2 * kv_heads) * width)
    found = []
    for ahead in (False, True):
        k, v = pools[0].clone(), pools[1].clone()
        scratch.sums.zero_()
        scratch.stats.zero_()
        torch.cuda.synchronize(device)
        out = decode_attention(qkv, heads, rows, work, scratch, k, v, 0, turning=turning, early=ahead, ahead=ahead)
        found.append((out, k, v, scratch.sums.clone(), scratch.stats.clone()))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
