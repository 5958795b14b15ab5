"""The embedded models give their recorded logits, tokens and exit depths in float32."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.build import build_model
from epicycle.engine.models.locate import locate
from tests.fakes.driver import Served, logits_by_depth, serve
from tests.reference import huginn_dense, ouro_dense

LOGIT_TOLERANCE = 2e-3  # of the recorded values, as their note says
TOKEN_MARGIN = 1e-3  # below it another correct order of float32 sums may pick the other token
EXIT_MARGIN = 1e-4  # the same for the exit rule's F and the threshold
STOP = (0, 2)
COMPARED_TOKENS = 16  # of each recorded run: past it a run repeats what was already exercised


@cache
def model(name: str) -> LoopedModel:
    return build_model(
        locate(name),
        dtype=torch.float32,
        device=torch.device("cpu"),
        weights="checkpoint",
        ops=PlainOps(),
        start_state="zero",
    )


def read(name: str, file: str) -> Any:
    return json.loads((locate(name).folder / file).read_text())


def dense_inputs(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder: Path = locate(name).folder
    stored = load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {key: value.float() for key, value in stored.items()}


OURO_CASES = read("embedded:ouro", "golden.json")["cases"]
HUGINN_CASES = read("embedded:huginn", "golden.json")["cases"]
SERVING_RUNS = [
    (number, case["prompt_ids"], run)
    for number, case in enumerate(read("embedded:ouro", "golden_serving.json")["cases"])
    for run in case["runs"]
]
RUN_NAMES = [f"text{number}-q{r['exit_threshold']}-{r['min_loops']}{r['max_loops']}" for number, _, r in SERVING_RUNS]


@cache
def served_run(index: int) -> Served:
    _, prompt, run = SERVING_RUNS[index]
    return serve(
        model("embedded:ouro"),
        prompt,
        count=min(len(run["ids"]), COMPARED_TOKENS),
        threshold=run["exit_threshold"],
        min_loops=run["min_loops"],
        max_loops=run["max_loops"],
        stop=STOP,
    )


def assert_recorded(expected: list[list[float]], logits: Tensor) -> None:
    """`expected`: (id, logit) of the best five."""
    ids, values = [int(pair[0]) for pair in expected], torch.tensor([pair[1] for pair in expected])
    torch.testing.assert_close(logits[ids], values, atol=LOGIT_TOLERANCE, rtol=0)
    assert logits.max() <= values.max() + LOGIT_TOLERANCE


@pytest.mark.parametrize("case", OURO_CASES, ids=range(len(OURO_CASES)))
def test_ouro_logits_match_the_record_at_every_depth(case: dict[str, Any]) -> None:
    for expected, logits in zip(case["top5"], logits_by_depth(model("embedded:ouro"), case["ids"]), strict=True):
        assert_recorded(expected, logits[-1])


@pytest.mark.parametrize("case", HUGINN_CASES, ids=range(len(HUGINN_CASES)))
def test_huginn_logits_match_the_record(case: dict[str, Any]) -> None:
    depths = logits_by_depth(model("embedded:huginn"), case["ids"])
    for depth, expected in case["top5"].items():
        assert_recorded(expected, depths[int(depth) - 1][-1])


@pytest.mark.parametrize("case", HUGINN_CASES, ids=range(len(HUGINN_CASES)))
def test_huginn_greedy_text_matches_the_record(case: dict[str, Any]) -> None:
    served = serve(model("embedded:huginn"), case["ids"], count=len(case["greedy_r8"]), stop=STOP)
    agreed = sure_prefix(served.token_margins, served.exit_margins)
    assert case["greedy_r8"][:agreed] == served.ids[:agreed]


@pytest.mark.parametrize("index", range(len(SERVING_RUNS)), ids=RUN_NAMES)
def test_ouro_serving_matches_the_record(index: int) -> None:
    run, served = SERVING_RUNS[index][2], served_run(index)
    agreed = sure_prefix(served.token_margins, served.exit_margins)
    assert run["ids"][:agreed] == served.ids[:agreed]
    assert run["exit_depths"][:agreed] == served.exit_depths[:agreed]


def test_margins_excuse_few_recorded_tokens() -> None:
    runs = [served_run(index) for index in range(7)]
    compared = sum(sure_prefix(run.token_margins, run.exit_margins) for run in runs)
    assert compared >= 0.75 * sum(len(run.ids) for run in runs)


def test_ouro_equals_the_dense_reference() -> None:
    config, weights = dense_inputs("embedded:ouro")
    for case in OURO_CASES[:2]:
        dense = ouro_dense.run(config, weights, case["ids"])
        for expected, actual in zip(dense, logits_by_depth(model("embedded:ouro"), case["ids"]), strict=True):
            torch.testing.assert_close(actual, ouro_dense.logits(weights, expected.state), atol=1e-4, rtol=0)


def test_ouro_gates_of_the_dense_reference_match_the_record() -> None:
    config, weights = dense_inputs("embedded:ouro")
    for case in OURO_CASES:
        gates = torch.stack([torch.sigmoid(depth.gate) for depth in ouro_dense.run(config, weights, case["ids"])])
        torch.testing.assert_close(gates, torch.tensor(case["lambda"]), atol=1e-4, rtol=0)


def test_huginn_equals_the_dense_reference() -> None:
    config, weights = dense_inputs("embedded:huginn")
    for case in HUGINN_CASES[:2]:
        dense = huginn_dense.run(config, weights, case["ids"])
        for expected, actual in zip(dense, logits_by_depth(model("embedded:huginn"), case["ids"]), strict=True):
            torch.testing.assert_close(actual, huginn_dense.logits(weights, expected), atol=1e-4, rtol=0)


def sure_prefix(token_margins: list[float], exit_margins: list[float]) -> int:
    """How many tokens must agree: up to the first whose own or whose exit's margin excuses a difference."""
    margins = zip(token_margins, exit_margins, strict=True)
    unsure = [index for index, (token, leave) in enumerate(margins) if token < TOKEN_MARGIN or leave < EXIT_MARGIN]
    return unsure[0] if unsure else len(token_margins)
