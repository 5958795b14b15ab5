"""top-k, top-p and min-p over integer weights.

Owns the exact search for the limits by sorting each row; `kernels.limit_triton` finds the same without a sort, because
all sums are of integers. Which tokens survive is a function of the row alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from epicycle.engine.logprobs import ordered_bits

# What the likeliest token weighs. Sums over 2**18 tokens stay within the 53 bits that float64 holds exactly; a token
# less likely than the likeliest by more than this factor is never drawn.
UNIT: Final = 2.0**34
_LOWEST_KEY: Final = -(1 << 31)


def filtered(scaled: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [M, W] int64 with 0 for what top-k, then top-p, then min-p exclude.

    scaled [M, W] float32 are the logits over temperature with the row's peak taken off, weights exp of it in `UNIT`s.
    Ties with the last survivor survive; the likeliest token always does.
    """
    keys = ordered_bits(scaled)
    weights = weights.masked_fill(keys < sorted_limit(keys, weights, top_k, top_p), 0)
    least = torch.ceil(min_p.to(torch.float64) * UNIT).to(torch.int64).unsqueeze(1)
    return weights.masked_fill(weights < least, 0)


def sorted_limit(keys: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[M, 1] int32: the lowest key that survives top-k and then top-p, by sorting each row."""
    ordered, places = keys.sort(dim=-1, descending=True)
    last = (top_k - 1).clamp(min=0, max=keys.shape[1] - 1).unsqueeze(1)
    k_key = ordered.gather(1, last).masked_fill(top_k.unsqueeze(1) <= 0, _LOWEST_KEY)
    kept = weights.gather(1, places).masked_fill(ordered < k_key, 0)
    running = kept.cumsum(dim=-1)
    limit = (top_p.to(torch.float64) * running[:, -1]).unsqueeze(1)
    survivors = (running - kept < limit).sum(dim=-1, keepdim=True)
    p_key = ordered.gather(1, (survivors - 1).clamp(min=0))
    return torch.maximum(k_key, p_key.masked_fill(top_p.unsqueeze(1) >= 1.0, _LOWEST_KEY))
