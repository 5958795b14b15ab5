"""The embedded models, served through the pump, give their recorded tokens and exit depths in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epicycle.engine.engine import Engine
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, serve_all, serve_alone

TOKEN_MARGIN = 1e-3  # below it another correct order of float32 sums may pick the other token


def load(model: str, **options: object) -> Engine:
    return Engine.load(EngineConfig(model=model, slots=32, context_tokens=128, **options))  # type: ignore[arg-type]


def recorded(engine: Engine, file: str) -> Any:
    return json.loads(Path(engine.files.folder / file).read_text())["cases"]


@pytest.fixture(scope="module")
def ouro() -> Engine:
    return load("embedded:ouro")


def greedy(engine: Engine, count: int) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0, logprobs=1, stop_ids=pack(I32, engine.spec.eos_ids))


def bounds(run: dict[str, Any]) -> LoopBounds:
    return LoopBounds(min_loops=run["min_loops"], max_loops=run["max_loops"], exit_threshold=run["exit_threshold"])


def serving_runs(engine: Engine) -> tuple[list[Ask], list[dict[str, Any]]]:
    pairs = [(case, run) for case in recorded(engine, "golden_serving.json") for run in case["runs"]]
    asks = [Ask(case["prompt_ids"], greedy(engine, len(run["ids"])), bounds(run)) for case, run in pairs]
    return asks, [run for _, run in pairs]


def test_ouro_at_every_recorded_threshold_and_bound(ouro: Engine) -> None:
    asks, runs = serving_runs(ouro)
    outcomes = serve_all(ouro, asks)
    for run, outcome in zip(runs, outcomes, strict=True):
        if run["smallest_top2_margin"] > TOKEN_MARGIN:
            assert (run["ids"], run["exit_depths"]) == (outcome.tokens, outcome.depths)
    assert any(run["smallest_top2_margin"] > TOKEN_MARGIN for run in runs)


def test_ouro_alone_is_ouro_in_a_crowd_bit_for_bit(ouro: Engine) -> None:
    asks = [replace(ask, sampling=greedy(ouro, 8)) for ask in serving_runs(ouro)[0][:32]]
    crowd = serve_all(ouro, asks, chunk_tokens=48)
    picked = (1, 9, 17)
    assert [outcome.bits for outcome in serve_alone(ouro, [asks[index] for index in picked])] == [
        crowd[index].bits for index in picked
    ]


def test_huginn_from_a_zero_state() -> None:
    engine = load("embedded:huginn", start_state="zero")
    cases = recorded(engine, "golden.json")
    outcomes = serve_all(engine, [Ask(case["ids"], greedy(engine, len(case["greedy_r8"]))) for case in cases])
    assert [case["greedy_r8"] for case in cases] == [outcome.tokens for outcome in outcomes]
    assert {8} == {depth for outcome in outcomes for depth in outcome.depths}


def test_lookahead_names_depths_like_the_gate_one_loop_ahead(ouro: Engine) -> None:
    asks, _ = serving_runs(ouro)
    adaptive = [ask for ask in asks if ask.loops.exit_threshold == 0.7 and ask.loops.min_loops == 1][:3]
    ahead = serve_all(load("embedded:ouro", exit_rule="lookahead"), adaptive)
    assert all(depth >= 2 for outcome in ahead for depth in outcome.depths[1:])
    assert len({depth for outcome in ahead for depth in outcome.depths[1:]}) > 1
