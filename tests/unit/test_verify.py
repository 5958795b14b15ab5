"""`verify` on a tiny engine: it finds nothing where nothing is wrong, and a fault where one was put in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from epicycle.engine.engine import Engine
from epicycle.engine.outbox import StepOutput
from epicycle.engine.pump import Pump
from epicycle.tools import verify
from epicycle.tools.verify_conditions import CONDITIONS, skip_reason
from epicycle.tools.verify_run import EngineKeeper
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.columns import F32, I32, U16, pack, unpack_list
from epicycle.transport.wire.output import TokenBatch
from tests.fakes.late_mover import make_copies_late
from tests.fakes.serving import tiny_folder

Fault = Callable[[TokenBatch], TokenBatch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("m"), "ouro")


def words(folder: Path, *more: str) -> list[str]:
    cut = ["--outputs", "6", "--longest-prompt", "20", "--set", "page_tokens=4", "--set", "prompt_chunk_tokens=8"]
    return ["--model", str(folder), *cut, *more]


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


class FaultyPump:
    """A pump that changes the token batches with company in them: what a batch-dependent kernel would do."""

    def __init__(self, pump: Pump, fault: Fault) -> None:
        self._pump = pump
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pump, name)

    def collect(self) -> StepOutput:
        output = self._pump.collect()
        for messages in output.to_gateways.values():
            messages[:] = [self._changed(message) for message in messages]
        return output

    def _changed(self, message: Any) -> Any:
        has_company = isinstance(message, TokenBatch) and len(message.rids) > 8
        return self._fault(message) if has_company else message


def faulty(fault: Fault) -> Callable[[EngineConfig], Engine]:
    def load(options: EngineConfig) -> Engine:
        engine = Engine.load(options)
        make = engine.new_pump
        engine.new_pump = lambda epoch, watch=None: FaultyPump(make(epoch), fault)  # type: ignore[method-assign, assignment, return-value]
        return engine

    return load


def logprob_fault(batch: TokenBatch) -> TokenBatch:
    return msgspec.structs.replace(batch, logprobs=pack(F32, [one - 0.5 for one in unpack_list(F32, batch.logprobs)]))


def depth_fault(batch: TokenBatch) -> TokenBatch:
    depths = [depth + 1 for depth in unpack_list(U16, batch.exit_depths)]
    return msgspec.structs.replace(batch, exit_depths=pack(U16, depths))


def token_fault(batch: TokenBatch) -> TokenBatch:
    return msgspec.structs.replace(batch, tokens=pack(I32, [token ^ 1 for token in unpack_list(I32, batch.tokens)]))


def test_no_trial_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = 2 * sum(not skip_reason(condition, "cpu") for condition in CONDITIONS.values())
    assert 0 == verify.main(words(folder, "--trials", str(trials)))
    text, report = last_json(capsys)
    assert f"0 of {trials} trials differ" in text
    assert (trials, 0) == (report["trials"], report["differ"])
    assert {"8-concurrent", "64-concurrent", "slots-8", "staggered", "growing-leases"} <= set(report["conditions"])
    assert {"chunk-64", "chunk-256", "chunk-2048", "poison", "rectangular"} <= set(report["conditions"])
    assert {"prefix-hits", "prefix-hits-chunk-64"} <= set(report["conditions"])
    assert " 0 prompt tokens cached" not in text
    assert "run-ahead-1" in report["skipped"]
    assert {2} == {entry["trials"] for entry in report["conditions"].values()}


def test_conditions_that_time_does_not_allow_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--trials", "2", "--conditions", "8-concurrent", "staggered", "--most-seconds", "1e-9")
    assert 0 == verify.main(words(folder, *more))
    _, report = last_json(capsys)
    assert ({}, {"8-concurrent", "staggered"}) == (report["conditions"], set(report["skipped"]))


def test_trials_are_taken_off_the_device_and_come_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == verify.main(words(folder, "--trials", "8", "--conditions", "preempted", "resumed"))
    _, report = last_json(capsys)
    assert {"preempted", "resumed"} == set(report["preemptions"])
    assert min(report["preemptions"].values()) > 0


def test_rows_whose_copies_take_many_steps_come_back_all_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(options: EngineConfig) -> Engine:
        engine = Engine.load(options)
        make_copies_late(engine, 30)
        return engine

    room = ("--outputs", "24", "--set", "host_kv_bytes=67108864")
    assert 0 == verify.main(words(folder, *room, "--trials", "4", "--conditions", "preempted"), load)
    assert last_json(capsys)[1]["preemptions"]["preempted"] > 4


def test_random_weights_follow_listed_depths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--trials", "4", "--weights", "random", "--conditions", "8-concurrent", "staggered")
    assert 0 == verify.main(words(folder, *more))
    _, report = last_json(capsys)
    assert ("trace", 0, 4) == (report["options"]["exit_rule"], report["differ"], report["trials"])


@pytest.mark.parametrize(
    ("fault", "what"), [(logprob_fault, "logprob"), (depth_fault, "depth"), (token_fault, "token")]
)
def test_a_fault_that_needs_company_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], fault: Fault, what: str
) -> None:
    more = ("--trials", "3", "--conditions", "8-concurrent")
    assert 1 == verify.main(words(folder, *more), load=faulty(fault))
    text, report = last_json(capsys)
    assert report["differ"] == report["trials"] == 3
    assert f"differs: {what} at output" in text
    assert what == report["differing"][0]["what"]
    assert {"trials": 3, "differ": 3} == report["conditions"]["8-concurrent"]


def test_the_first_differing_tensor_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys of one layer are wrong wherever more rows than one request has are written together."""

    def load(options: EngineConfig) -> Engine:
        engine = Engine.load(options)
        write = engine.pool.write

        def write_wrongly(cells: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
            write(cells, layer, k + 0.25 if layer == 1 and len(k) > 8 else k, v)

        engine.pool.write = write_wrongly  # type: ignore[method-assign]
        return engine

    assert 1 == verify.main(words(folder, "--trials", "3", "--conditions", "8-concurrent"), load=load)
    text, report = last_json(capsys)
    assert re.fullmatch(r"K of layer 1 in plane \d at position \d+", report["first_tensor"])
    assert f"the first differing tensor: {report['first_tensor']}" in text


def test_what_differs_behind_the_kv_is_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == verify.main(words(folder, "--trials", "3", "--conditions", "8-concurrent"), load=faulty(logprob_fault))
    assert last_json(capsys)[1]["first_tensor"].startswith("none in KV")


def test_nothing_to_try_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == verify.main(words(folder, "--device", "cpu", "--conditions", "run-ahead-1"))
    assert "every condition asked for is skipped" in capsys.readouterr().err


def test_an_unknown_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == verify.main(["--model", "nowhere"])
    assert "--model nowhere" in capsys.readouterr().err


def test_one_engine_is_kept_for_equal_options_only(folder: Path) -> None:
    loaded: list[EngineConfig] = []

    def load(options: EngineConfig) -> Engine:
        loaded.append(options)
        return Engine.load(options)

    plain = EngineConfig(model=str(folder), slots=2)
    poisoned = EngineConfig(model=str(folder), slots=2, poison=True)
    keeper = EngineKeeper(load)
    assert keeper.get(plain) is keeper.get(EngineConfig(model=str(folder), slots=2))
    keeper.get(poisoned)
    assert [plain, poisoned] == loaded
