"""A row's token and log-probabilities are the same bits in any company; broken rows stay their own problem."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from epicycle.engine.logprobs import clean_rows, raw_logprobs, widen
from epicycle.engine.sampler import Sampled, sample
from epicycle.engine.sampling import SamplerSteps, SamplingParams, SlotSampling, steps_for

FIELDS = ("tokens", "logprob", "top_ids", "top_logprobs", "is_finite")


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 5, 50]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.25]),
        seed=rng.getrandbits(64),
        choice=rng.randrange(4),
        min_tokens=rng.choice([0, 30]),
        logit_bias=rng.choice([{}, {rng.randrange(vocab_size): 3.5}]),
        stop_ids=tuple(rng.sample(range(vocab_size), 3)),
        alternatives=rng.choice([0, 3, 20]),
    )


class Crowd:
    """Slots with random parameters and a fixed row of logits each."""

    def __init__(self, count: int, vocab_size: int) -> None:
        rng = random.Random(f"{count} {vocab_size}")
        self.params = [random_params(rng, vocab_size) for _ in range(count)]
        self.columns = SlotSampling(count, vocab_size, bias_cap=2, stop_cap=4)
        for slot, params in enumerate(self.params):
            history = [rng.randrange(vocab_size) for _ in range(40)]
            self.columns.write(slot, params, prompt_ids=history[:20], output_ids=history[20:])
        generator = torch.Generator().manual_seed(count)
        self.logits = torch.randn(count, vocab_size, generator=generator) * 3
        self.positions = torch.randint(1, 5000, (count,), generator=generator)

    def sample(self, slots: Tensor, steps: SamplerSteps) -> Sampled:
        generated = torch.full_like(slots, 20)
        rows = self.columns.gather(slots, self.positions[slots], generated, steps)
        return sample(self.logits[slots], rows, steps)


@pytest.mark.parametrize(("count", "vocab_size"), [(41, 1000), (70, 4096), (19, 31)])
def test_rows_have_the_same_bits_alone_batched_and_shuffled(count: int, vocab_size: int) -> None:
    crowd = Crowd(count, vocab_size)
    steps = SamplerSteps()
    together = crowd.sample(torch.arange(count), steps)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    shuffled = crowd.sample(order, steps)
    alone = [crowd.sample(torch.tensor([slot]), steps) for slot in range(count)]
    for field in FIELDS:
        expected = getattr(together, field)
        assert torch.equal(expected[order], getattr(shuffled, field))
        assert torch.equal(expected, torch.cat([getattr(one, field) for one in alone]))
    assert len(set(together.tokens.tolist())) > count // 4


def test_steps_a_row_does_not_use_change_none_of_its_bits() -> None:
    crowd = Crowd(60, 500)
    full = crowd.sample(torch.arange(60), SamplerSteps())
    for slot, params in enumerate(crowd.params):
        steps = steps_for([params])
        lean = crowd.sample(torch.tensor([slot]), steps)
        assert full.tokens[slot] == lean.tokens[0]
        assert full.logprob[slot] == lean.logprob[0]
        assert torch.equal(full.top_ids[slot, : steps.alternatives], lean.top_ids[0])
        assert torch.equal(full.top_logprobs[slot, : steps.alternatives], lean.top_logprobs[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_row_is_named_and_leaves_the_others_alone(poison: float) -> None:
    crowd = Crowd(12, 200)
    slots = torch.arange(12)
    whole = crowd.sample(slots, SamplerSteps())
    crowd.logits[5, 77] = poison
    crowd.logits[9] = -math.inf
    broken = crowd.sample(slots, SamplerSteps())
    assert broken.is_finite.tolist() == [slot not in (5, 9) for slot in range(12)]
    others = torch.tensor([slot for slot in range(12) if slot not in (5, 9)])
    for field in FIELDS:
        assert torch.equal(getattr(whole, field)[others], getattr(broken, field)[others])
    assert bool(((broken.tokens >= 0) & (broken.tokens < 200)).all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_held_back_is_named(temperature: float) -> None:
    columns = SlotSampling(1, 2, bias_cap=1, stop_cap=2)
    params = SamplingParams(temperature=temperature, stop_ids=(0, 1), min_tokens=1)
    columns.write(0, params)
    zero = torch.zeros(1, dtype=torch.int64)
    steps = SamplerSteps(alternatives=0)
    sampled = sample(torch.tensor([[1.0, 2.0]]), columns.gather(zero, zero, zero, steps), steps)
    assert sampled.is_finite.tolist() == [False]
    assert 0 <= int(sampled.tokens[0]) < 2


def test_logprobs_are_the_models_own_whatever_the_sampler_did() -> None:
    crowd = Crowd(33, 700)
    sampled = crowd.sample(torch.arange(33), SamplerSteps())
    expected = torch.log_softmax(crowd.logits.double(), dim=-1)
    chosen = expected.gather(1, sampled.tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(sampled.logprob.double(), chosen, rtol=1e-6, atol=1e-6)
    values, ids = expected.topk(20)
    for slot, params in enumerate(crowd.params):
        wanted = params.alternatives
        assert torch.equal(ids[slot, :wanted], sampled.top_ids[slot, :wanted])
        torch.testing.assert_close(sampled.top_logprobs[slot, :wanted].double(), values[slot, :wanted])
        assert sampled.top_ids[slot, wanted:].tolist() == [-1] * (20 - wanted)
        assert sampled.top_logprobs[slot, wanted:].tolist() == [-math.inf] * (20 - wanted)


def test_prompt_rows_get_logprobs_of_given_tokens_and_ties_list_lower_ids_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -math.inf], [0.0, -0.0, 0.0, -5.0]])
    clean, is_finite = clean_rows(logits)
    report = raw_logprobs(widen(clean), torch.tensor([3, 2]), torch.tensor([3, 2]), 3)
    assert is_finite.tolist() == [True, True]
    assert report.logprob[0] == -math.inf
    assert report.logprob[1] == pytest.approx(-math.log(3 + math.exp(-5)))
    assert report.top_ids.tolist() == [[1, 2, 0], [0, 1, -1]]


def test_logprobs_stay_accurate_for_certain_and_for_even_distributions() -> None:
    certain = torch.full((1, 50_000), -40.0)
    certain[0, 123] = 0.0
    even = torch.zeros(1, 50_000)
    zero = torch.zeros(2, dtype=torch.int64)
    report = raw_logprobs(widen(torch.cat((certain, even))), torch.tensor([123, 7]), zero, 0)
    assert report.logprob.tolist() == pytest.approx([0.0, -math.log(50_000)], abs=1e-6)
