"""Every sampling field moves the result away from what its neutral value gives; draws follow the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epicycle.engine.sampler import Sampled, sample, stops
from epicycle.engine.sampling import SamplerSteps, SamplingParams, SlotSampling, steps_for

GREEDY = SamplingParams(temperature=0.0)


def sample_one(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> int:
    """The token of a single row, through slot columns."""
    return int(sample_many(logits, params, 1, prompt, output).tokens[0])


def sample_many(
    logits: Sequence[float],
    params: SamplingParams,
    draws: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Sampled:
    """The same row at `draws` positions in a row."""
    columns = SlotSampling(2, len(logits), bias_cap=4, stop_cap=4)
    columns.write(1, params, prompt, output)
    steps = steps_for([params])
    slots = torch.ones(draws, dtype=torch.int64)
    rows = columns.gather(slots, torch.arange(draws) + 10, torch.full_like(slots, len(output)), steps)
    return sample(torch.tensor([logits] * draws, dtype=torch.float32), rows, steps)


def drawn_ids(logits: Sequence[float], params: SamplingParams, draws: int = 3000) -> set[int]:
    return set(sample_many(logits, params, draws).tokens.tolist())


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_temperature_zero_takes_the_lowest_of_the_likeliest_ids() -> None:
    tied = [0.0] * 1000
    tied[700] = tied[300] = tied[999] = 2.5
    assert sample_one(tied, GREEDY) == 300


def test_temperature_zero_ignores_the_seed() -> None:
    assert {sample_one(logs(0.4, 0.6), replace(GREEDY, seed=seed)) for seed in range(20)} == {1}


def chi_square(tokens: Tensor, expected: Sequence[float]) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * len(tokens)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    probabilities = [0.02, 0.4, 0.08, 0.2, 0.05, 0.15, 0.07, 0.03]
    powers = [p ** (1 / temperature) for p in probabilities]
    params = SamplingParams(temperature=temperature, seed=3)
    tokens = sample_many(logs(*probabilities), params, 20_000).tokens
    assert chi_square(tokens, [p / sum(powers) for p in powers]) < 24.3  # 0.1 % point at 7 degrees of freedom


def test_a_tiny_temperature_is_greedy_instead_of_not_a_number() -> None:
    sampled = sample_many([1.0, 1.5, -3.0], SamplingParams(temperature=1e-40), 50)
    assert set(sampled.tokens.tolist()) == {1}
    assert bool(sampled.is_finite.all())


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert drawn_ids(logits, SamplingParams()) == {0, 1, 2, 3}
    assert drawn_ids(logits, SamplingParams(top_k=2)) == {1, 3}
    assert drawn_ids(logits, SamplingParams(top_k=99)) == {0, 1, 2, 3}


def test_top_k_keeps_ties_with_the_last_place() -> None:
    assert drawn_ids(logs(0.2, 0.4, 0.2, 0.2), SamplingParams(top_k=2)) == {0, 1, 2, 3}


def test_top_p_keeps_the_token_that_crosses_the_mass_and_none_after_it() -> None:
    logits = logs(0.1, 0.5, 0.15, 0.25)
    assert drawn_ids(logits, SamplingParams(top_p=0.7)) == {1, 3}
    assert drawn_ids(logits, SamplingParams(top_p=0.8)) == {1, 2, 3}
    assert drawn_ids(logits, SamplingParams(top_p=1e-6)) == {1}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    assert drawn_ids(logits, SamplingParams(top_p=0.6)) == {0, 1}
    assert drawn_ids(logits, SamplingParams(top_p=0.55, top_k=2)) == {0}


def test_min_p_drops_what_is_too_unlikely_beside_the_likeliest() -> None:
    logits = logs(0.5, 0.26, 0.2, 0.04)
    assert drawn_ids(logits, SamplingParams(min_p=0.5)) == {0, 1}
    assert drawn_ids(logits, SamplingParams(min_p=1.0)) == {0}


def test_filtered_draws_keep_the_proportions_of_the_survivors() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    tokens = sample_many(logits, SamplingParams(top_k=3, seed=5), 20_000).tokens
    places = torch.tensor([-1, 0, 1, 2])[tokens]
    assert chi_square(places, [4 / 9, 2 / 9, 3 / 9]) < 13.8  # 0.1 % point at 2 degrees of freedom


def test_repetition_penalty_looks_at_prompt_and_output_and_at_the_sign() -> None:
    penalised = replace(GREEDY, repetition_penalty=2.0)
    assert sample_one([3.0, 2.0, 1.0], penalised) == 0
    assert sample_one([3.0, 2.0, 1.0], penalised, prompt=[0]) == 1
    assert sample_one([3.0, 2.0, 1.0], penalised, output=[0, 1]) == 0
    assert sample_one([-1.0, -1.5, -9.0], penalised, output=[0]) == 1


def test_presence_penalty_counts_a_word_once_and_looks_at_the_output_only() -> None:
    penalised = replace(GREEDY, presence_penalty=0.75)
    assert sample_one([2.0, 1.5, 0.0], penalised, output=[0]) == 1
    assert sample_one([2.0, 1.0, 0.0], penalised, output=[0, 0, 0]) == 0
    assert sample_one([2.0, 1.5, 0.0], penalised, prompt=[0]) == 0


def test_frequency_penalty_grows_with_every_use_in_the_output() -> None:
    penalised = replace(GREEDY, frequency_penalty=0.4)
    assert sample_one([2.0, 1.0, 0.0], penalised, output=[0, 0]) == 0
    assert sample_one([2.0, 1.0, 0.0], penalised, output=[0, 0, 0]) == 1
    assert sample_one([2.0, 1.0, 0.0], penalised, prompt=[0, 0, 0]) == 0


def test_tokens_counted_in_the_tick_feed_the_next_penalties_of_live_rows() -> None:
    params = replace(GREEDY, frequency_penalty=0.4)
    columns = SlotSampling(3, 4, bias_cap=1, stop_cap=1)
    columns.write(0, params)
    columns.write(2, params)
    for _ in range(3):
        columns.count(torch.tensor([2, 0]), torch.tensor([1, 1]), torch.tensor([True, False]))
    assert columns.output_counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0]]


def test_a_slot_taken_again_forgets_the_previous_history() -> None:
    columns = SlotSampling(1, 4, bias_cap=1, stop_cap=1)
    columns.write(0, replace(GREEDY, presence_penalty=1.0), prompt_ids=[0, 1], output_ids=[2, 2])
    columns.write(0, replace(GREEDY, presence_penalty=1.0), prompt_ids=[3], output_ids=[1])
    assert columns.output_counts.tolist() == [[0, 1, 0, 0]]
    assert columns.prompt_seen.tolist() == [[False, False, False, True]]


def test_logit_bias_is_added_to_its_tokens() -> None:
    assert sample_one([1.0, 0.5, 0.0], replace(GREEDY, logit_bias={2: 1.5})) == 2
    assert sample_one([1.0, 0.5, 0.0], replace(GREEDY, logit_bias={0: -100.0, 2: 0.25})) == 1


def test_stop_ids_cannot_come_before_min_tokens() -> None:
    params = replace(GREEDY, stop_ids=(0, 1), min_tokens=2)
    assert sample_one([3.0, 2.0, 1.0], params, output=[2]) == 2
    assert sample_one([3.0, 2.0, 1.0], params, output=[2, 2]) == 0


def test_stops_names_the_rows_whose_token_ends_them() -> None:
    columns = SlotSampling(2, 8, bias_cap=1, stop_cap=3)
    columns.write(0, replace(GREEDY, stop_ids=(5, 7)))
    slots = torch.tensor([0, 0, 0, 1])
    rows = columns.gather(slots, slots, slots, SamplerSteps())
    assert stops(torch.tensor([7, 6, 5, 5]), rows).tolist() == [True, False, True, False]


def test_seed_choice_and_position_each_give_another_stream() -> None:
    flat = [0.0] * 512
    base = sample_many(flat, SamplingParams(seed=1), 40).tokens
    assert torch.equal(base, sample_many(flat, SamplingParams(seed=1), 40).tokens)
    assert not torch.equal(base, sample_many(flat, SamplingParams(seed=2), 40).tokens)
    assert not torch.equal(base, sample_many(flat, SamplingParams(seed=1, choice=1), 40).tokens)
    assert len(set(base.tolist())) > 30


def test_the_largest_seed_is_accepted_and_differs_from_its_neighbours() -> None:
    flat = [0.0] * 512
    streams = {
        tuple(sample_many(flat, SamplingParams(seed=seed), 8).tokens.tolist())
        for seed in (2**64 - 1, 2**63, 2**63 - 1, 0)
    }
    assert len(streams) == 4


def test_a_batch_runs_only_the_steps_its_rows_use() -> None:
    assert steps_for([GREEDY]) == SamplerSteps(
        penalise=False, bias=False, hold_stops=False, draw=False, filter=False, alternatives=0
    )
    rich = SamplingParams(
        top_k=3, presence_penalty=0.1, logit_bias={1: 1.0}, min_tokens=1, stop_ids=(2,), alternatives=20
    )
    assert steps_for([GREEDY, rich]) == SamplerSteps()
