"""top-k, top-p and min-p over integer weights.

Owns two exact searches for the limits, equal in every bit because all sums are of integers: one sorts each row (the
plain twin, and the faster one on a CPU), one bisects the order of float32 bit patterns and needs neither a sort nor a
copy of the row. Which tokens survive is a function of the row alone.
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
_KEY_BITS: Final = 32


def filtered(scaled: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [M, W] int64 with 0 for what top-k, then top-p, then min-p exclude.

    scaled [M, W] float32 are the logits over temperature with the row's peak taken off, weights exp of it in `UNIT`s.
    Ties with the last survivor survive; the likeliest token always does.
    """
    keys = ordered_bits(scaled)
    limit_of = sorted_limit if keys.is_cpu else bisected_limit
    weights = weights.masked_fill(keys < limit_of(keys, weights, top_k, top_p), 0)
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


def bisected_limit(keys: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The same as `sorted_limit`, by bisection."""
    k_key = _top_k_key(keys, top_k)
    return torch.maximum(k_key, _top_p_key(keys, weights.masked_fill(keys < k_key, 0), top_p))


def _top_k_key(keys: Tensor, top_k: Tensor) -> Tensor:
    """[M, 1]: the k-th largest key, so that ties with it survive; below every key where there is no limit."""
    low = torch.full_like(top_k, _LOWEST_KEY).unsqueeze(1)
    high = torch.ones_like(low)  # no key is above 0
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        is_enough = (keys >= middle.to(torch.int32)).sum(dim=-1, keepdim=True) >= top_k.unsqueeze(1)
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return low.masked_fill(top_k.unsqueeze(1) <= 0, _LOWEST_KEY).to(torch.int32)


def _top_p_key(keys: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """[M, 1]: the smallest key whose strictly greater tokens hold less than top_p of the weight.

    So a token survives while the likelier ones haven't yet filled top_p.
    """
    limit = (top_p.to(torch.float64) * weights.sum(dim=-1)).unsqueeze(1)
    low = torch.full_like(limit, _LOWEST_KEY, dtype=torch.int64)
    high = torch.zeros_like(low)  # the likeliest token's key
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        above = weights.masked_fill(keys <= middle.to(torch.int32), 0).sum(dim=-1, keepdim=True)
        is_open = above < limit
        low, high = torch.where(is_open, low, middle), torch.where(is_open, middle, high)
    return high.masked_fill(top_p.unsqueeze(1) >= 1.0, _LOWEST_KEY).to(torch.int32)
