"""From logits to tokens, a batch at a time, on the device, with no host value and no data-dependent shape.

Owns the order of steps: penalties, bias, held stop ids, then temperature, top-k, top-p, min-p and the draw; at
temperature 0 the likeliest token (lowest id on ties) and nothing random. A row's token is a function of its own logits
and columns: probabilities become integers (2**34 stands for the likeliest token), whose sums are exact in any order,
limits are found by bisecting the order of float32 bit patterns instead of sorting, and the one random number comes from
(seed, choice, position). It knows nothing of slots or streams; `sampling.SlotSampling` gathers its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from epicycle.engine.logprobs import clean_rows, ordered_bits, raw_logprobs, widen
from epicycle.engine.penalties import add_bias, hold_stops, penalise
from epicycle.engine.rng import uniform
from epicycle.engine.sampling import SampleRows, SamplerSteps

# Sums over 2**18 tokens stay within the 53 bits that float64 holds exactly; a token less likely than the likeliest by
# more than this factor is never drawn.
_UNIT: Final = 2.0**34
_LOWEST_KEY: Final = -(1 << 31)
_KEY_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Sampled:
    """Where a row isn't finite nothing else about it means anything; the other rows are not affected."""

    tokens: Tensor  # [M] int64
    logprob: Tensor  # [M] float32, of the token in the model's own distribution
    top_ids: Tensor  # [M, K] int64, -1 beyond what the row asked for
    top_logprobs: Tensor  # [M, K] float32
    is_finite: Tensor  # [M] bool: the logits allow a token before and after the edits


def sample(logits: Tensor, rows: SampleRows, steps: SamplerSteps) -> Sampled:
    """One token for each row of logits [M, V] float32."""
    clean, is_whole = clean_rows(logits)
    padded = widen(clean)
    edited = _edited(clean, padded, rows, steps)
    peak = edited.amax(dim=-1, keepdim=True)
    tokens = edited.argmax(dim=-1)
    if steps.draw:
        tokens = torch.where(rows.temperature > 0, _drawn(edited, peak, rows, steps), tokens)
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # rows that can't be sampled may point past the end
    report = raw_logprobs(padded, tokens, rows.alternatives, steps.alternatives)
    is_finite = is_whole & torch.isfinite(peak.squeeze(1))
    return Sampled(tokens, report.logprob, report.top_ids, report.top_logprobs, is_finite)


def stops(tokens: Tensor, rows: SampleRows) -> Tensor:
    """[M] bool: rows whose token [M] is one of their stop ids."""
    return (tokens.unsqueeze(1) == rows.stop_ids).any(dim=1)


def _edited(clean: Tensor, padded: Tensor, rows: SampleRows, steps: SamplerSteps) -> Tensor:
    """[M, W] logits after everything that precedes temperature; `padded` is `clean` widened."""
    edited = widen(penalise(clean, rows)) if steps.penalise else padded
    if steps.bias:
        edited = add_bias(edited, rows)
    return hold_stops(edited, rows, clean.shape[1]) if steps.hold_stops else edited


def _drawn(edited: Tensor, peak: Tensor, rows: SampleRows, steps: SamplerSteps) -> Tensor:
    """[M] int64: the token at which the running sum of weights passes a random share of their total."""
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1)
    # The peak goes first, so that a tiny temperature drives the others to -inf instead of overflowing.
    scaled = (edited - peak) / temperature
    weights = (torch.exp(scaled) * _UNIT).to(torch.int64)
    if steps.filter:
        weights = _filtered(scaled, weights, rows)
    running = weights.cumsum(dim=-1)
    total = running[:, -1]
    share = uniform(rows.seed, rows.choice, rows.positions, torch.zeros_like(rows.positions))
    target = torch.minimum((share * total.to(torch.float64)).to(torch.int64), total - 1)
    return (running <= target.unsqueeze(1)).sum(dim=-1)


def _filtered(scaled: Tensor, weights: Tensor, rows: SampleRows) -> Tensor:
    """weights [M, W] with 0 for what top-k, then top-p, then min-p exclude. scaled [M, W] is at most 0."""
    keys = ordered_bits(scaled)
    weights = torch.where(keys >= _top_k_key(keys, rows.top_k), weights, 0)
    weights = torch.where(keys >= _top_p_key(keys, weights, rows.top_p), weights, 0)
    least = torch.ceil(rows.min_p.to(torch.float64) * _UNIT).to(torch.int64).unsqueeze(1)
    return torch.where(weights >= least, weights, 0)


def _top_k_key(keys: Tensor, top_k: Tensor) -> Tensor:
    """[M, 1]: the k-th largest key, so that ties with it survive; below every key where there is no limit."""
    low = torch.full_like(top_k, _LOWEST_KEY).unsqueeze(1)
    high = torch.ones_like(low)  # no key is above 0
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        is_enough = (keys >= middle.to(torch.int32)).sum(dim=-1, keepdim=True) >= top_k.unsqueeze(1)
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return torch.where(top_k.unsqueeze(1) > 0, low, _LOWEST_KEY).to(torch.int32)


def _top_p_key(keys: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """[M, 1]: the smallest key whose strictly greater tokens hold less than top_p of the weight.

    So a token survives while the likelier ones haven't yet filled top_p, and the likeliest always does.
    """
    limit = (top_p.to(torch.float64) * weights.sum(dim=-1)).unsqueeze(1)
    low = torch.full_like(limit, _LOWEST_KEY, dtype=torch.int64)
    high = torch.zeros_like(low)  # the likeliest token's key
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        above = torch.where(keys > middle.to(torch.int32), weights, 0).sum(dim=-1, keepdim=True)
        is_open = above < limit
        low, high = torch.where(is_open, low, middle), torch.where(is_open, middle, high)
    return torch.where(top_p.unsqueeze(1) < 1.0, high, _LOWEST_KEY).to(torch.int32)
