"""The mix of requests that `verify` tries, and the table of its conditions."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from epicycle.tools.verify_conditions import CONDITIONS, Condition, share, skip_reason
from epicycle.tools.verify_requests import MixFacts, describe, make_company, make_trials, prompt_lengths
from epicycle.transport.wire.columns import U16, unpack_list

FACTS = MixFacts(vocab_size=61, loops=4, longest_prompt=40, outputs=8, edges=(16, 64, 64), is_traced=False)


def test_lengths_lie_around_every_edge_in_reach() -> None:
    assert [1, 2, 15, 16, 17, 40] == prompt_lengths(FACTS)
    assert [1, 2, 15, 16, 17, 63, 64, 65, 70] == prompt_lengths(replace(FACTS, longest_prompt=70))


def test_enough_trials_cover_every_edge() -> None:
    lengths = {len(request.prompt) for request in make_trials(FACTS, 12, seed=1)}
    assert set(prompt_lengths(FACTS)) <= lengths
    assert max(lengths) <= 40


def test_half_are_sampled_and_a_third_leave_early() -> None:
    trials = make_trials(FACTS, 60, seed=1)
    assert 30 == sum(request.sampling.temperature > 0 for request in trials)
    assert 20 == sum(request.loops.exit_threshold < 1 for request in trials)
    assert {8} == {request.sampling.max_tokens for request in trials}
    assert {0} == {request.sampling.logprobs for request in trials}


def test_every_part_of_the_sampler_is_met() -> None:
    sampled = [request.sampling for request in make_trials(FACTS, 60, seed=1) if request.sampling.temperature > 0]
    assert any(one.top_k for one in sampled)
    assert any(one.top_p < 1 for one in sampled)
    assert any(one.min_p > 0 for one in sampled)
    assert any(one.repetition_penalty != 1 for one in sampled)
    assert any(one.presence_penalty for one in sampled)
    assert any(one.frequency_penalty for one in sampled)
    assert any(one.logit_bias_ids for one in sampled)


def test_traced_requests_list_depths_and_the_first_is_full() -> None:
    trials = make_trials(replace(FACTS, is_traced=True), 6, seed=1)
    listed = [unpack_list(U16, request.loops.exit_trace) for request in trials]
    assert {8} == {len(depths) for depths in listed}
    assert {4} == {depths[0] for depths in listed}
    assert [False, False, True] * 2 == [min(depths) < 4 for depths in listed]


def test_the_mix_follows_the_seed() -> None:
    assert make_trials(FACTS, 5, seed=1) == make_trials(FACTS, 5, seed=1)
    assert make_trials(FACTS, 5, seed=1) != make_trials(FACTS, 5, seed=2)


def test_company_never_ends_and_differs_from_the_trials() -> None:
    company = list(islice(make_company(FACTS, seed=1), 20))
    assert 20 == len(company)
    assert make_trials(FACTS, 20, seed=1) != company


def test_company_may_be_as_long_as_the_trials() -> None:
    lengths = [
        max(len(request.prompt) for request in islice(make_company(FACTS, seed=1, is_long=is_long), 40))
        for is_long in (False, True)
    ]
    assert lengths[0] <= FACTS.longest_prompt // 2 < lengths[1] <= FACTS.longest_prompt


def test_a_request_is_described_in_a_few_words() -> None:
    greedy, sampled, early = make_trials(FACTS, 3, seed=1)
    assert f"{len(greedy.prompt)} prompt tokens, greedy" == describe(greedy)
    assert f"{len(sampled.prompt)} prompt tokens, sampled" == describe(sampled)
    assert f"{len(early.prompt)} prompt tokens, greedy, early exit" == describe(early)


def test_trials_are_shared_out_evenly() -> None:
    assert [4, 3, 3] == share(10, 3)
    assert [1, 0] == share(1, 2)


def test_a_condition_whose_option_is_missing_is_skipped_with_its_name() -> None:
    assert "this engine has no option warp_speed" == skip_reason(Condition(options={"warp_speed": 9}), "cuda")


def test_what_needs_a_gpu_is_skipped_on_a_cpu() -> None:
    assert "it means nothing on cpu" in skip_reason(CONDITIONS["run-ahead-1"], "cpu")
    assert "" == skip_reason(CONDITIONS["run-ahead-1"], "cuda")
    assert "" == skip_reason(CONDITIONS["poison"], "cpu")
