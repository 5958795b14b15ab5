"""Log-probabilities of the model's own distribution: before temperature, penalties and filters.

Owns the normaliser and the report of alternatives, for generated tokens and for prompt rows alike. The normaliser is a
sum of integers (2**44 stands for the likeliest token), which is exact in any order: a row's bits don't depend on how a
device splits the vocabulary or on the other rows. Also owns the spare columns that widen a vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

_VECTOR_LANES: Final = 32
UNIT: Final = 2.0**44  # a sum over 2**18 tokens stays below 2**63, and what truncation loses below 2**-26
_ID_MASK: Final = 0xFFFFFFFF
MAX_VOCAB: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: Tensor  # [M] float32, of the chosen token; -inf where the model excludes it
    top_ids: Tensor  # [M, K] int64, likeliest first, lower id first on ties; -1 beyond what the row asked for
    top_logprobs: Tensor  # [M, K] float32; -inf beyond what the row asked for


def clean_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V] -> (the same with broken rows set to 0, [M] bool: rows that are whole).

    A row with a NaN, with +inf or with nothing above -inf is broken; single -inf entries are not.
    """
    is_finite = torch.isfinite(logits.amax(dim=-1))
    return logits.masked_fill(~is_finite.unsqueeze(1), 0.0), is_finite


def widen(logits: Tensor) -> Tensor:
    """logits [M, V] -> [M, W]: -inf columns up to a multiple of 32, at least one of them."""
    vocab_size = logits.shape[1]
    assert vocab_size <= MAX_VOCAB
    return pad(logits, (0, _VECTOR_LANES - vocab_size % _VECTOR_LANES), value=-math.inf)


def ordered_bits(x: Tensor) -> Tensor:
    """float32 -> int32 in the same order; both zeros map to one value."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def raw_logprobs(padded: Tensor, tokens: Tensor, wanted: Tensor, width: int) -> Logprobs:
    """padded [M, W] float32 from `clean_rows` and `widen`, tokens [M] and wanted [M] int64 alternatives, K = width."""
    peak = padded.amax(dim=-1, keepdim=True)
    log_total = _log_total(padded, peak).unsqueeze(1)
    chosen = _log_share(padded, tokens.unsqueeze(1), peak, log_total).squeeze(1)
    if width == 0:
        return Logprobs(chosen, tokens.new_zeros(len(tokens), 0), chosen.new_zeros(len(tokens), 0))
    ids = _likeliest(padded, width)
    is_beyond = torch.arange(width, device=padded.device) >= wanted.unsqueeze(1)
    shares = _log_share(padded, ids, peak, log_total)
    return Logprobs(chosen, ids.masked_fill(is_beyond, -1), shares.masked_fill(is_beyond, -math.inf))


def _log_total(padded: Tensor, peak: Tensor) -> Tensor:
    """[M] float64: log of the sum of exp(x - peak)."""
    total = (torch.exp(padded - peak) * UNIT).to(torch.int64).sum(dim=-1)
    count = len(total)
    return torch.log(pad(total, (0, -count % _VECTOR_LANES), value=1).to(torch.float64) / UNIT)[:count]


def _log_share(padded: Tensor, ids: Tensor, peak: Tensor, log_total: Tensor) -> Tensor:
    """[M, K] float32 log-probabilities of ids [M, K]."""
    return ((padded.gather(1, ids) - peak).to(torch.float64) - log_total).to(torch.float32)


def _likeliest(padded: Tensor, width: int) -> Tensor:
    """ids [M, width] of the largest logits. Value and id share one integer: no ties, so every top-k agrees."""
    lanes = torch.arange(padded.shape[1], dtype=torch.int64, device=padded.device)
    keys = (ordered_bits(padded).to(torch.int64) << 32) | (_ID_MASK - lanes)
    return _ID_MASK - (keys.topk(width, dim=-1).values & _ID_MASK)
