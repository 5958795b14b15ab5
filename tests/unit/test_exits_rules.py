"""Exit rules: the published test vectors, equality with the host oracles, bits that don't depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from epicycle.engine.exits import fixed, latent_diff, lookahead, ouro, random_lookahead, trace
from epicycle.engine.exits.base import ExitRows, ExitRule
from epicycle.engine.exits.lookahead import Lookahead, LookaheadHead
from epicycle.engine.exits.numerics import sigmoid
from epicycle.engine.exits.random_lookahead import RandomLookahead
from epicycle.engine.exits.registry import RuleSetup, load

LOOPS = 6
HIDDEN = 40  # no power of two and no multiple of a vector
Feed = Callable[[int, ExitRows], ExitRows]

VECTORS = [
    # hazards, threshold, min, max, ouro, delayed, random_lookahead with s = p
    ((0.3, 0.3, 0.3, 0.3), 0.5, 2, 4, 2, 3, 4),
    ((0.3, 0.3, 0.3, 0.3), 0.6, 2, 4, 3, 4, 4),
    ((0.3, 0.3, 0.3, 0.3), 0.9, 2, 3, 3, 3, 3),
    ((0.9, 0.1, 0.1, 0.1), 0.5, 1, 4, 1, 2, 2),
    ((0.9, 0.1, 0.1, 0.1), 0.5, 2, 4, 2, 3, 2),
    ((0.9, 0.1, 0.1, 0.1), 0.5, 3, 4, 3, 4, 4),
    ((0.1, 0.1, 0.6, 0.1), 0.5, 2, 4, 3, 4, 4),
    ((0.1, 0.6, 0.1, 0.1), 0.5, 2, 4, 2, 3, 3),
    ((0.1, 0.1, 0.1, 0.1), 0.5, 2, 4, 4, 4, 4),
    ((0.9, 0.9, 0.9, 0.9), 1.0, 2, 4, 4, 4, 4),
    ((0.0, 0.0, 0.0, 0.0), 0.0, 2, 4, 2, 3, 2),
    ((0.9, 0.9, 0.9, 0.9), 0.5, 4, 4, 4, 4, 4),
]


def logit(hazard: float) -> float:
    return -math.inf if hazard == 0 else math.log(hazard / (1 - hazard))


def start_rows(threshold: Tensor, min_loops: Tensor, max_loops: Tensor) -> ExitRows:
    count = len(threshold)
    zeros = torch.zeros(count, dtype=torch.int64)
    return ExitRows(
        loops_done=zeros,
        survival=torch.ones(count),
        pending=zeros,
        threshold=threshold,
        min_loops=min_loops,
        max_loops=max_loops,
        state_after=torch.zeros(count, HIDDEN),
    )


def run_rule(rule: ExitRule, rows: ExitRows, feed: Feed) -> list[int]:
    """Drive every row loop by loop until all have left, as the pump would; the exit depths."""
    depths = torch.zeros_like(rows.loops_done)
    for k in range(1, int(rows.max_loops.max()) + 1):
        rows = feed(k, replace(rows, loops_done=torch.full_like(depths, k)))
        decision = rule.decide(rows)
        depths = torch.where((depths == 0) & decision.leave, k, depths)
        rows = replace(rows, survival=decision.survival, pending=decision.pending)
    return [int(depth) for depth in depths]


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_bounds(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    steps = torch.tensor([0.0, 0.2, 0.35, 0.5, 0.7, 0.9, 0.97, 1.0])
    threshold = steps[torch.randint(len(steps), (count,), generator=generator)]
    max_loops = torch.randint(1, LOOPS + 1, (count,), generator=generator)
    min_loops = (torch.rand(count, generator=generator) * max_loops).long() + 1
    return threshold, min_loops, max_loops


@pytest.mark.parametrize(("hazards", "threshold", "low", "high", "same", "delayed", "ahead"), VECTORS)
def test_rules_give_the_published_exit_depths(
    hazards: tuple[float, ...], threshold: float, low: int, high: int, same: int, delayed: int, ahead: int
) -> None:
    rows = start_rows(torch.tensor([threshold]), bounds(low), bounds(high))

    def feed(k: int, now: ExitRows) -> ExitRows:
        value = torch.tensor([logit(hazards[k - 1])])
        return replace(now, gate=value, state_after=value.unsqueeze(1))

    setup = RuleSetup(hidden_size=1, loops=4)
    assert run_rule(load("ouro", setup), rows, feed) == [same]
    assert run_rule(load("ouro_delayed", setup), rows, feed) == [delayed]
    assert run_rule(RandomLookahead(torch.ones(1)), rows, feed) == [ahead]
    assert same == ouro.oracle(hazards, threshold, low, high)
    assert delayed == ouro.oracle_delayed(hazards, threshold, low, high)
    assert ahead == random_lookahead.oracle(hazards, threshold, low, high)


def test_gate_rules_equal_their_oracles_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    count = 301
    rows = start_rows(*random_bounds(count, generator))
    gates = torch.randn(LOOPS, count, generator=generator) * 2
    hazards = [[float(p) for p in sigmoid(gates)[:, row]] for row in range(count)]
    limits = [float(value) for value in rows.threshold]
    bounds_of = [(int(low), int(high)) for low, high in zip(rows.min_loops, rows.max_loops, strict=True)]
    for name, oracle in (("ouro", ouro.oracle), ("ouro_delayed", ouro.oracle_delayed)):
        expected = [oracle(hazards[row], limits[row], *bounds_of[row]) for row in range(count)]
        rule = load(name, RuleSetup(hidden_size=HIDDEN, loops=LOOPS))
        assert expected == run_rule(rule, rows, lambda k, now: replace(now, gate=gates[k - 1]))
        assert len(set(expected)) == LOOPS


def test_random_lookahead_equals_its_oracle_and_repeats_for_a_seed() -> None:
    generator = torch.Generator().manual_seed(2)
    count = 101
    rows = start_rows(*random_bounds(count, generator))
    states = torch.randn(LOOPS, count, HIDDEN, generator=generator)
    setup = RuleSetup(hidden_size=HIDDEN, loops=LOOPS, init_std=0.3, random_seed=9)
    rule = RandomLookahead.build(setup)
    scores = [rule.score(state) for state in states]
    expected = [
        random_lookahead.oracle(
            [float(score[row]) for score in scores],
            float(rows.threshold[row]),
            int(rows.min_loops[row]),
            int(rows.max_loops[row]),
        )
        for row in range(count)
    ]
    assert expected == run_rule(rule, rows, lambda k, now: replace(now, state_after=states[k - 1]))
    assert torch.equal(rule.weight, RandomLookahead.build(setup).weight)
    assert not torch.equal(rule.weight, RandomLookahead.build(replace(setup, random_seed=10)).weight)


def make_head(generator: torch.Generator, inner: int = 8) -> LookaheadHead:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return LookaheadHead(
        scale=normal(2),
        inner=normal(inner, 2 * HIDDEN) * 0.2,
        inner_bias=normal(inner),
        step=normal(LOOPS, inner),
        outer=normal(LOOPS, inner),
        outer_bias=normal(LOOPS),
    )


def test_lookahead_head_follows_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    head = make_head(generator)
    state, previous = torch.randn(5, HIDDEN, generator=generator), torch.randn(5, HIDDEN, generator=generator)
    done = bounds(1, 2, 3, 5, 6)
    at = done.clamp(max=LOOPS - 1)
    joined = torch.cat((state * head.scale[0], previous * head.scale[1]), dim=-1).double()
    hidden = torch.nn.functional.silu(joined @ head.inner.double().T + head.inner_bias + head.step[at])
    expected = (hidden @ head.outer.double().T + head.outer_bias).gather(1, at.unsqueeze(1))[:, 0]
    torch.testing.assert_close(head.next_gate(state, previous, done), expected.float(), rtol=1e-5, atol=1e-5)


def test_lookahead_equals_its_oracle_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(4)
    count = 203
    rule = Lookahead(make_head(generator))
    rows = start_rows(*random_bounds(count, generator))
    previous = torch.randn(count, HIDDEN, generator=generator)
    rows = replace(rows, previous_final=previous)
    states = torch.randn(LOOPS, count, HIDDEN, generator=generator)
    gates = torch.randn(LOOPS, count, generator=generator) - 1
    hazards = sigmoid(gates)
    foretold = [sigmoid(rule.head.next_gate(states[k], previous, torch.full((count,), k + 1))) for k in range(LOOPS)]
    expected = [
        lookahead.oracle(
            [float(p) for p in hazards[:, row]],
            [float(p[row]) for p in foretold],
            float(rows.threshold[row]),
            int(rows.min_loops[row]),
            int(rows.max_loops[row]),
        )
        for row in range(count)
    ]
    feed: Feed = lambda k, now: replace(now, gate=gates[k - 1], state_after=states[k - 1])  # noqa: E731
    assert expected == run_rule(rule, rows, feed)
    assert len(set(expected)) == LOOPS


def test_latent_diff_equals_its_oracle_and_reads_the_state_half_only() -> None:
    generator = torch.Generator().manual_seed(5)
    count = 97
    rows = start_rows(*random_bounds(count, generator))
    shrink = 0.6 ** torch.arange(LOOPS + 1).reshape(-1, 1, 1)
    states = 1 + torch.randn(LOOPS + 1, count, 2 * HIDDEN, generator=generator) * shrink
    states[:, :, HIDDEN:] *= 1e6  # an injection half that would drown the state
    halves = states[:, :, :HIDDEN].numpy()
    expected = [
        latent_diff.oracle(
            [halves[k, row] for k in range(LOOPS + 1)],
            float(rows.threshold[row]),
            int(rows.min_loops[row]),
            int(rows.max_loops[row]),
        )
        for row in range(count)
    ]
    rule = load("latent_diff", RuleSetup(hidden_size=HIDDEN, loops=LOOPS))
    feed: Feed = lambda k, now: replace(now, state_before=states[k - 1], state_after=states[k])  # noqa: E731
    assert expected == run_rule(rule, rows, feed)
    assert len(set(expected)) == LOOPS


def test_latent_diff_threshold_097_leaves_at_a_change_of_003() -> None:
    after = torch.ones(2, HIDDEN)
    before = after * torch.tensor([[1.0299], [1.0301]])
    rows = start_rows(torch.tensor([0.97, 0.97]), bounds(1, 1), bounds(9, 9))
    rows = replace(rows, loops_done=bounds(3, 3), state_before=before, state_after=after)
    rule = load("latent_diff", RuleSetup(hidden_size=HIDDEN, loops=9))
    assert rule.decide(rows).leave.tolist() == [True, False]


def test_a_state_that_has_stopped_moving_stays_at_threshold_one_and_a_zero_state_never_counts() -> None:
    same = torch.stack((torch.ones(HIDDEN), torch.zeros(HIDDEN)))
    rows = start_rows(torch.tensor([1.0, 0.5]), bounds(1, 1), bounds(9, 9))
    rows = replace(rows, loops_done=bounds(2, 2), state_before=same, state_after=same)
    rule = load("latent_diff", RuleSetup(hidden_size=HIDDEN, loops=9))
    assert rule.decide(rows).leave.tolist() == [False, False]


def test_trace_leaves_at_the_listed_depth_within_the_maximum() -> None:
    rows = start_rows(torch.ones(4), bounds(1, 1, 1, 1), bounds(6, 6, 3, 6))
    rows = replace(rows, traced_depth=bounds(1, 4, 5, 6))
    rule = load("trace", RuleSetup(hidden_size=HIDDEN, loops=LOOPS))
    expected = [trace.oracle(*pair) for pair in ((1, 6), (4, 6), (5, 3), (6, 6))]
    assert expected == [1, 4, 3, 6]
    assert expected == run_rule(rule, rows, lambda k, now: now)


def test_fixed_ignores_the_threshold() -> None:
    rows = start_rows(torch.tensor([0.0, 1.0]), bounds(1, 1), bounds(2, 5))
    rule = load("fixed", RuleSetup(hidden_size=HIDDEN, loops=LOOPS))
    assert run_rule(rule, rows, lambda k, now: now) == [fixed.oracle(2), fixed.oracle(5)]


def test_rows_that_leave_start_the_next_token_afresh() -> None:
    rows = start_rows(torch.tensor([0.5, 0.5]), bounds(1, 3), bounds(4, 4))
    rows = replace(rows, loops_done=bounds(1, 1), gate=torch.tensor([2.0, 2.0]))
    decision = load("ouro", RuleSetup(hidden_size=HIDDEN, loops=LOOPS)).decide(rows)
    assert decision.leave.tolist() == [True, False]
    assert decision.survival[0] == 1.0
    assert decision.survival[1] == 1.0 - sigmoid(torch.tensor([2.0]))


@pytest.mark.parametrize("name", ["ouro", "ouro_delayed", "random_lookahead", "lookahead", "latent_diff"])
def test_decisions_of_a_row_have_the_same_bits_alone_batched_and_shuffled(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    count = 67
    threshold, min_loops, max_loops = random_bounds(count, generator)
    rows = ExitRows(
        loops_done=torch.randint(1, LOOPS, (count,), generator=generator),
        survival=torch.rand(count, generator=generator),
        pending=torch.zeros(count, dtype=torch.int64),
        threshold=threshold,
        min_loops=min_loops,
        max_loops=max_loops,
        state_after=torch.randn(count, 2 * HIDDEN, generator=generator),
        state_before=torch.randn(count, 2 * HIDDEN, generator=generator),
        gate=torch.randn(count, generator=generator),
        previous_final=torch.randn(count, HIDDEN, generator=generator),
    )
    setup = RuleSetup(hidden_size=HIDDEN, loops=LOOPS)
    rule = Lookahead(make_head(generator)) if name == "lookahead" else load(name, setup)
    together = rule.decide(rows)
    order = torch.randperm(count, generator=generator)
    shuffled = rule.decide(pick(rows, order))
    alone = [rule.decide(pick(rows, torch.tensor([row]))) for row in range(count)]
    for field in ("leave", "survival", "pending"):
        expected = getattr(together, field)
        assert torch.equal(expected[order], getattr(shuffled, field))
        assert torch.equal(expected, torch.cat([getattr(one, field) for one in alone]))


def pick(rows: ExitRows, index: Tensor) -> ExitRows:
    taken = {name: getattr(rows, name) for name in ExitRows.__slots__}
    return ExitRows(**{name: None if value is None else value[index] for name, value in taken.items()})


def test_scores_of_a_row_have_the_same_bits_alone_and_batched() -> None:
    generator = torch.Generator().manual_seed(7)
    head, random_rule = make_head(generator), RandomLookahead(torch.randn(HIDDEN, generator=generator))
    distance = latent_diff.LatentDiff(HIDDEN).distance
    states, others = torch.randn(2, 53, HIDDEN, generator=generator)
    done = torch.randint(1, LOOPS, (53,), generator=generator)
    for score in (
        lambda at: head.next_gate(states[at], others[at], done[at]),
        lambda at: random_rule.score(states[at]),
        lambda at: distance(states[at], others[at]),
    ):
        assert torch.equal(score(slice(None)), torch.cat([score(slice(row, row + 1)) for row in range(53)]))


def test_sigmoid_is_within_two_steps_of_the_exact_value_at_any_length() -> None:
    values = torch.linspace(-30, 30, 61)
    exact = np.array([1 / (1 + math.exp(-float(value))) for value in values])
    for length in (1, 7, 33, 61):
        error = np.abs(sigmoid(values[:length]).double().numpy() - exact[:length])
        assert bool((error <= 2 * np.spacing(exact[:length].astype(np.float32))).all())
