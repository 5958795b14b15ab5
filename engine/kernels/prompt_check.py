"""Whether prompt attention for Hopper gives the bits of its twin on this card, with this compiler.

Owns two comparisons, made once for a shape: chunks that begin and end anywhere, with poison in cells that nobody has
written; and many short jobs behind deep ones, again and again, because what one job leaves behind too early the next
one overwrites only now and then. Where a bit differs, or the kernel is refused, the twin serves. It must not know pools
or ticks.
"""

from __future__ import annotations

from functools import cache

import torch

from epicycle.engine.kernels.hopper_prompt_triton import ROWS, hopper_prompt_attention, takes
from epicycle.engine.kernels.prompt_attention_triton import prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.spans import normals, pack_spans, span_columns

CHUNKS = ((0, 300), (130, 129), (700, 1), (5, 64), (0, 1), (63, 65), (448, 256))
"""First position and rows: less than a tile of keys, whole tiles, halves of an item without rows, ragged ends."""
SHORT_BEHIND_DEEP = ((256, 1024), (0, 104), (0, 127), (0, 40), (3, 90), (0, 104), (0, 128))
"""More jobs than multiprocessors, the last of them of one or two tiles of keys."""
TIMES = 32


@cache
def hopper_prompt_holds(
    heads: int, kv_heads: int, width: int, page_tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True where prompts may use it. Uses some hundred MiB and waits for the device."""
    if not takes(width, page_tokens, dtype, device):
        return False
    try:
        shape = heads, kv_heads, width, page_tokens, dtype, device
        return _is_equal(CHUNKS, 1, *shape) and _is_equal(SHORT_BEHIND_DEEP, TIMES, *shape)
    except Exception:  # this card or this Triton refuses it: whatever the reason, it isn't used
        return False


def _is_equal(
    spans: tuple[tuple[int, int], ...],
    times: int,
    heads: int,
    kv_heads: int,
    width: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Of chunks `spans`, each a request of its own."""
    generator = torch.Generator(device).manual_seed(heads)
    normal = normals(generator, dtype)
    window = -(-max(first + count for first, count in spans) // page_tokens)
    table = torch.randperm(len(spans) * window, device=device, generator=generator, dtype=torch.int32)
    table = table.view(len(spans), window)
    size = 2 * table.numel(), page_tokens, kv_heads, width
    k, v = normal(*size), normal(*size)
    slots, positions = span_columns(spans, device)
    rows = RowAddresses(slots, positions, torch.zeros_like(slots), table, 2)
    for index, (first, count) in enumerate(spans):
        beyond = torch.arange(first + count, window * page_tokens, dtype=torch.int32, device=device)
        owner = torch.full_like(beyond, index)
        cells = RowAddresses(owner, beyond, torch.zeros_like(owner), table, 2).cells(1, page_tokens)
        for pool in (k, v):
            pool.view(-1, kv_heads, width)[cells] = float("nan")
    q = normal(len(slots), heads * width)
    for item in ROWS:
        chunks, _ = pack_spans(spans, item, device)
        expected = prompt_attention(q, heads, rows, chunks, k, v, 1)
        for _ in range(times):
            out = torch.full_like(expected, float("nan"))
            hopper_prompt_attention(q, heads, rows, chunks, k, v, 1, out=out)
            if not torch.equal(expected, out):  # what isn't a number equals nothing
                return False
    return True
