"""From logits to tokens, a batch at a time, on the device, with no host value and no data-dependent shape.

Owns the order of steps: penalties, bias, held stop ids, then temperature, top-k, top-p, min-p and the draw; at
temperature 0 the likeliest token (lowest id on ties) and nothing random. A row's token is a function of its own logits
and columns: probabilities become integers, whose sums are exact in any order, and the one random number comes from
(seed, choice, position). It knows nothing of slots or streams; `sampling.SlotSampling` gathers its rows. A GPU's tick
has `kernels.sample_triton` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.filters import UNIT, filtered
from epicycle.engine.logprobs import clean_rows, raw_logprobs, widen
from epicycle.engine.penalties import add_bias, hold_stops, penalise
from epicycle.engine.rng import uniform
from epicycle.engine.sampling import SampleRows, SamplerSteps


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
    temperature = rows.temperature.masked_fill(rows.temperature <= 0, 1.0).unsqueeze(1)
    # The peak goes first, so that a tiny temperature drives the others to -inf instead of overflowing.
    scaled = (edited - peak) / temperature
    weights = (torch.exp(scaled) * UNIT).to(torch.int64)
    if steps.filter:
        weights = filtered(scaled, weights, rows.top_k, rows.top_p, rows.min_p)
    running = weights.cumsum(dim=-1)
    total = running[:, -1]
    share = uniform(rows.seed, rows.choice, rows.positions, torch.zeros_like(rows.positions))
    target = torch.minimum((share * total.to(torch.float64)).to(torch.int64), total - 1)
    return (running <= target.unsqueeze(1)).sum(dim=-1)
