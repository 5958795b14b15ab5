"""The workload file: what it says, what it refuses, and the depths it prescribes."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.tools.bench_workload import Arrivals, WorkloadError, WorkloadFile, read_workloads

HEAD = """
[defaults]
seed = 7
repeats = 3
dtype = "bfloat16"
page_tokens = 16
[models.m]
config = "embedded:ouro"
weights = "random"
[workloads]
"""
GOOD = (
    'w = { model = "m", kind = "burst", streams = 2, requests = 2, prompt = 8, output = 4, context = 12, slots = 2 }\n'
)


@pytest.fixture(scope="module")
def packaged() -> WorkloadFile:
    return read_workloads()


def read(tmp_path: Path, line: str) -> WorkloadFile:
    path = tmp_path / "w.toml"
    path.write_text(HEAD + line)
    return read_workloads(path)


def test_a_packaged_workload_has_every_field(packaged: WorkloadFile) -> None:
    load = packaged.pick("ouro_16k_c8_exit")
    assert ("closed", 8, 16, 16_384, 128, 16_640, 8) == (
        load.kind,
        load.streams,
        load.requests,
        load.prompt,
        load.output,
        load.context,
        load.slots,
    )
    assert "trace" == load.exit_rule
    assert "ouro-1.4b" == packaged.model_of(load).config
    assert "bfloat16" == packaged.model_of(load).dtype


def test_arrivals_and_prompt_lists_are_read(packaged: WorkloadFile) -> None:
    assert Arrivals(every_ms=200, prompt=2048, output=16, count=20) == packaged.pick("ouro_interference").arrivals
    mixed = packaged.pick("ouro_long_beside_short")
    assert [60_000] + [1200] * 7 == [mixed.prompt_tokens(number) for number in range(mixed.requests)]


def test_the_last_turn_of_a_session_is_its_longest(packaged: WorkloadFile) -> None:
    assert 1500 + 5 * (300 + 96) + 96 == packaged.pick("sessions_ouro").longest_tokens


def test_the_seed_is_the_date_of_the_first_figures(packaged: WorkloadFile) -> None:
    assert 20_261_129 == packaged.defaults.seed


def test_an_unknown_name_is_told_the_known_ones(packaged: WorkloadFile) -> None:
    with pytest.raises(WorkloadError, match=r"'nonsense' is not one of ouro_1k_c1, "):
        packaged.pick("nonsense")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('model = "m"', 'model = "x"', "model 'x' is not one of m"),
        ("context = 12", "context = 11", "has 12 tokens, above context 11"),
        ("prompt = 8", "prompt = 8, prompts = [8, 8]", "one of prompt and prompts"),
        ("prompt = 8", "prompts = [8]", "an entry for each request"),
        ("streams = 2, ", "", "kind 'burst' needs streams, requests"),
        ("output = 4", "output = 0", "output is 0"),
        ("slots = 2", 'slots = 2, depths = "threshold-x"', "depths 'threshold-x'"),
        ("slots = 2", "slots = 2, slot = 3", "unknown field `slot`"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    read(tmp_path, GOOD)
    with pytest.raises(WorkloadError, match=expected):
        read(tmp_path, GOOD.replace(old, new))


def test_drawn_depths_start_full_and_average_two_and_a_half(packaged: WorkloadFile) -> None:
    load = packaged.pick("ouro_1k_b32_exit")
    drawn = [load.draw_depths([1, number], 4, 128) for number in range(200)]
    assert {128} == {len(depths) for depths in drawn}
    assert {4} == {depths[0] for depths in drawn}
    later = [depth for depths in drawn for depth in depths[1:]]
    assert 2.45 == pytest.approx(sum(later) / len(later), abs=0.02)
    assert 0.66 == pytest.approx(later.count(2) / len(later), abs=0.01)


def test_drawn_depths_follow_the_seed(packaged: WorkloadFile) -> None:
    load = packaged.pick("ouro_1k_b32_exit")
    assert load.draw_depths([1, 2], 4, 64) == load.draw_depths([1, 2], 4, 64)
    assert load.draw_depths([1, 2], 4, 64) != load.draw_depths([1, 3], 4, 64)


def test_depths_a_model_does_not_have_are_refused(packaged: WorkloadFile) -> None:
    with pytest.raises(WorkloadError, match=r"need 4 loops, the model runs 2"):
        packaged.pick("ouro_1k_b32_exit").draw_depths([1], 2, 8)


def test_fixed_depth_lists_nothing_and_a_threshold_uses_the_models_rule(packaged: WorkloadFile) -> None:
    fixed, gated = packaged.pick("tiny_b8"), packaged.pick("tiny_b8_gate")
    assert ([], "fixed", 1.0) == (fixed.draw_depths([1], 4, 8), fixed.exit_rule, fixed.threshold)
    assert ([], "", 0.7) == (gated.draw_depths([1], 4, 8), gated.exit_rule, gated.threshold)
