"""The two searches for the filters' limits agree in every bit, ties and edges included."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.filters import UNIT, bisected_limit, sorted_limit
from epicycle.engine.logprobs import ordered_bits


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 700])
@pytest.mark.parametrize("step", [0.0, 0.5])  # a coarse grid makes ties
def test_sorting_and_bisecting_find_the_same_limits(vocab_size: int, step: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(60, vocab_size, generator=generator) * 3
    logits = torch.round(logits / step) * step if step else logits
    logits[:, 1::5] = -torch.inf
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    keys, weights = ordered_bits(scaled), (torch.exp(scaled) * UNIT).to(torch.int64)
    top_k = torch.randint(-1, vocab_size + 3, (60,), generator=generator)
    top_p = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])[torch.randint(6, (60,), generator=generator)]
    by_sort, by_bisection = (limit(keys, weights, top_k, top_p) for limit in (sorted_limit, bisected_limit))
    assert torch.equal((keys >= by_sort) & (weights > 0), (keys >= by_bisection) & (weights > 0))
    assert bool(((keys >= by_sort) & (weights > 0)).any(dim=-1).all())
