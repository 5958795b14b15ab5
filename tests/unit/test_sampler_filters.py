"""The search for the filters' limits against their definition, ties and edges included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epicycle.engine.filters import UNIT, sorted_limit
from epicycle.engine.logprobs import ordered_bits


def survivors(keys: list[int], weights: list[int], top_k: int, top_p: float) -> set[int]:
    """By counting, for every token, the tokens that are likelier, and their weight."""
    places = range(len(keys))
    kept = {at for at in places if top_k <= 0 or sum(key > keys[at] for key in keys) < top_k}
    limit = math.inf if top_p >= 1 else top_p * sum(weights[at] for at in kept)
    return {
        at
        for at in kept
        if keys[at] == max(keys) or sum(weights[other] for other in kept if keys[other] > keys[at]) < limit
    }


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 100])
@pytest.mark.parametrize("step", [0.0, 0.5])  # a coarse grid makes ties
def test_limits_are_those_of_the_definition(vocab_size: int, step: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator) * 3
    logits = torch.round(logits / step) * step if step else logits
    logits[:, 1::5] = -torch.inf
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    keys, weights = ordered_bits(scaled), (torch.exp(scaled) * UNIT).to(torch.int64)
    top_k = torch.randint(-1, vocab_size + 3, (40,), generator=generator)
    top_p = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])[torch.randint(6, (40,), generator=generator)]
    kept: Tensor = (keys >= sorted_limit(keys, weights, top_k, top_p)) & (weights > 0)
    for row in range(40):
        expected = survivors(keys[row].tolist(), weights[row].tolist(), int(top_k[row]), float(top_p[row]))
        assert {at for at in expected if weights[row, at] > 0} == set(kept[row].nonzero().flatten().tolist())
    assert bool(kept.any(dim=-1).all())
