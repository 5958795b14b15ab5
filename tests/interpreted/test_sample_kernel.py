"""The sampler's kernel against its twin: tokens, logprobs, alternatives, counts, and rows that are nobody's."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels import limit_triton, sample_triton
from epicycle.engine.sampler import Sampled, sample
from epicycle.engine.sampling import SamplerSteps, SamplingParams, SlotSampling

GENERATED, SLOTS = 20, 40


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 5, 50, vocab_size + 1]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.0]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.25]),
        seed=rng.getrandbits(64),
        choice=rng.randrange(4),
        min_tokens=rng.choice([0, GENERATED + 1]),
        logit_bias=rng.choice([{}, {rng.randrange(vocab_size): 3.5, vocab_size - 1: -2.0}]),
        stop_ids=tuple(rng.sample(range(vocab_size), 3)),
        alternatives=rng.choice([0, 3, 20]),
    )


@dataclass
class Rows:
    """M candidates at slots [M] of columns that both sides have a copy of."""

    logits: Tensor
    slots: list[int]
    params: Sequence[SamplingParams]

    def columns(self) -> SlotSampling:
        vocab_size = self.logits.shape[1]
        columns = SlotSampling(SLOTS, vocab_size, bias_cap=3, stop_cap=5)
        for slot, params in zip(self.slots, self.params, strict=True):
            rng = random.Random(slot)
            said = [rng.randrange(vocab_size) for _ in range(2 * GENERATED)]
            columns.write(slot, params, prompt_ids=said[:GENERATED], output_ids=said[GENERATED:])
        return columns

    def by_torch(self) -> tuple[Sampled, Tensor]:
        columns, slots, steps = self.columns(), torch.tensor(self.slots), SamplerSteps()
        positions = slots * 3 + 8
        sampled = sample(self.logits, columns.gather(slots, positions, torch.full_like(slots, GENERATED), steps), steps)
        columns.count(slots, sampled.tokens, sampled.is_finite)
        return sampled, columns.output_counts

    def by_kernel(self, count: int | None = None) -> tuple[Sampled, Tensor]:
        columns, slots = self.columns(), torch.tensor(self.slots)
        found = torch.stack((torch.zeros_like(slots), slots, slots * 3 + 7, torch.zeros_like(slots)))
        due = torch.tensor([len(slots) if count is None else count], dtype=torch.int32)
        tokens, finite, logprob, ids, shares = sample_triton.sample(
            self.logits, found, due, torch.full((SLOTS,), GENERATED), columns
        )
        return Sampled(tokens, logprob, ids, shares, finite.bool()), columns.output_counts


def crowd(count: int, vocab_size: int, spread: float = 3.0) -> Rows:
    rng = random.Random(f"{count} {vocab_size}")
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, vocab_size, generator=generator) * spread
    return Rows(logits, rng.sample(range(SLOTS), count), [random_params(rng, vocab_size) for _ in range(count)])


def assert_equal(rows: Rows, expected: Sampled, actual: Sampled) -> None:
    assert torch.equal(expected.is_finite, actual.is_finite)
    finite = expected.is_finite
    assert expected.tokens[finite].tolist() == actual.tokens[finite].tolist()
    torch.testing.assert_close(actual.logprob[finite], expected.logprob[finite], atol=1e-5, rtol=0)
    for row in finite.nonzero().flatten().tolist():
        wanted = min(rows.params[row].alternatives, rows.logits.shape[1])
        assert torch.equal(expected.top_ids[row, :wanted], actual.top_ids[row, :wanted])
        torch.testing.assert_close(
            actual.top_logprobs[row, :wanted], expected.top_logprobs[row, :wanted], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(("count", "vocab_size"), [(40, 61), (40, 5000), (6, 9001)])
def test_rows_of_every_kind_get_the_twin_s_tokens_and_logprobs(count: int, vocab_size: int) -> None:
    rows = crowd(count, vocab_size)
    (expected, expected_counts), (actual, counts) = rows.by_torch(), rows.by_kernel()
    assert_equal(rows, expected, actual)
    for slot, params in zip(rows.slots, rows.params, strict=True):
        if params.penalises:
            assert torch.equal(expected_counts[slot], counts[slot])
    assert len(set(actual.tokens.tolist())) > count // 4


DRAWN = SamplingParams(temperature=1.0, seed=9)
FILTERED = [
    replace(DRAWN, top_k=4500),
    replace(DRAWN, top_p=0.7, temperature=0.5),
    replace(DRAWN, top_k=8000, top_p=0.4),
    replace(DRAWN, top_k=300, top_p=0.99),
]


@pytest.mark.parametrize(
    ("spread", "step"),
    [(0.1, 0.0), (1e-6, 0.0), (0.1, 0.0625), (0.0, 0.0), (40.0, 0.0)],
    ids=["flat", "flatter", "ties", "even", "steep"],
)
def test_limits_that_take_several_passes(spread: float, step: float) -> None:
    """More tokens near one another than a search holds at its end: it goes on until few are left, or equals."""
    vocab_size = 2 * limit_triton.ROOM.value + 500
    logits = torch.randn(len(FILTERED), vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    logits = torch.round(logits / step) * step if step else logits
    logits[:, 1::9] = -math.inf
    rows = Rows(logits, [3, 1, 4, 7], FILTERED)
    assert_equal(rows, rows.by_torch()[0], rows.by_kernel()[0])


def test_a_row_s_bits_are_its_own_and_rows_beyond_the_count_get_nothing() -> None:
    rows = crowd(9, 300)
    together, counts = rows.by_kernel()
    order = [5, 2, 8, 0, 1]
    some = Rows(rows.logits[order], [rows.slots[row] for row in order], [rows.params[row] for row in order])
    fewer, fewer_counts = some.by_kernel(count=3)
    for name in ("tokens", "logprob", "is_finite"):
        assert torch.equal(getattr(together, name)[order[:3]], getattr(fewer, name)[:3])
    assert [0, 0] == fewer.tokens[3:].tolist()
    assert [False, False] == fewer.is_finite[3:].tolist()
    assert torch.equal(some.columns().output_counts[some.slots[3:]], fewer_counts[some.slots[3:]])
    for row, slot in enumerate(some.slots[:3]):
        assert torch.equal(counts[slot], fewer_counts[slot])
        wanted = some.params[row].alternatives
        assert torch.equal(together.top_ids[order[row], :wanted], fewer.top_ids[row, :wanted])
        assert torch.equal(together.top_logprobs[order[row], :wanted], fewer.top_logprobs[row, :wanted])


def test_rows_that_no_token_can_be_told_from_are_named() -> None:
    held = SamplingParams(temperature=1.0, stop_ids=tuple(range(5)), min_tokens=GENERATED + 1)
    logits = torch.zeros(5, 5)
    logits[1, 3], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    rows = Rows(logits, [0, 1, 2, 3, 4], [DRAWN, DRAWN, DRAWN, DRAWN, held])
    sampled, _ = rows.by_kernel()
    assert [True, False, False, False, False] == sampled.is_finite.tolist()
    assert all(0 <= token < 5 for token in sampled.tokens.tolist())


def test_draws_have_the_twin_s_random_numbers() -> None:
    """Equal logits make equal weights, so the token alone tells the number: to one part in the vocabulary's size."""
    params = [replace(DRAWN, seed=seed, choice=3) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)]
    rows = Rows(torch.zeros(5, 20_000), [0, 1, 2, 3, 4], params)
    expected, actual = rows.by_torch()[0].tokens, rows.by_kernel()[0].tokens
    assert expected.tolist() == actual.tolist()
    assert len(set(actual.tolist())) == 5
