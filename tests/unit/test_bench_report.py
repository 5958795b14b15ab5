"""What `bench` prints for a workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epicycle.tools.bench_load import Record
from epicycle.tools.bench_plots import can_plot, save_plots
from epicycle.tools.bench_report import render, result_of
from epicycle.tools.bench_stats import RunResult
from epicycle.tools.bench_workload import read_workloads
from epicycle.tools.floors import DeviceRates, Floors
from tests.fakes.tiny_models import OURO, spec_of

FLOORS = Floors(spec_of(OURO), 4)
RATES = DeviceRates(1e6, 1e8)
LOAD = read_workloads().pick("tiny_c1")


def run(seconds: float) -> RunResult:
    times = [seconds / 2, seconds]
    one = Record(label="stream", prompt_tokens=32, submitted_s=0.0, token_s=times, depths=[4, 4])
    return RunResult(records=[one], decode_tokens_per_s=8.0, decode_streams=1, counters={"ticks": 8, "starved_pool": 0})


def test_medians_and_every_run_are_shown() -> None:
    text = render(result_of(LOAD, [run(1.0), run(4.0), run(2.0)], FLOORS, None))
    assert "tiny_c1  (3 runs, medians)" in text
    assert "tokens/s end to end    1.00   [2.00, 0.50, 1.00]" in text
    assert "tokens/s decoding      8.00" in text
    assert "unknown device: give --bandwidth and --flops" in text
    assert "ticks 8" in text
    assert "starved_pool" not in text


def test_the_fraction_is_the_floors_time_over_the_measured_time() -> None:
    result = result_of(LOAD, [run(1.0), run(4.0), run(2.0)], FLOORS, RATES)
    assert result["floor"]["serial_s"] / 2.0 == pytest.approx(result["floor"]["fraction"])
    assert f"of which {100 * result['floor']['fraction']:.1f} % reached" in render(result)


def test_sessions_have_no_floor_because_they_wait() -> None:
    sessions = read_workloads().pick("tiny_sessions")
    result = result_of(sessions, [run(1.0)], FLOORS, RATES)
    assert "none: waits are part of it" in render(result)


def test_latencies_that_nothing_was_measured_for_are_left_out() -> None:
    one = RunResult(records=[Record(label="stream", prompt_tokens=1, submitted_s=0.0, token_s=[1.0])])
    text = render(result_of(LOAD, [one], FLOORS, None))
    assert "TTFT" in text
    assert "ITL" not in text
    assert "tokens/s decoding      not measured" in text


def test_a_result_is_json() -> None:
    result = result_of(LOAD, [run(1.0)], FLOORS, RATES)
    assert result == json.loads(json.dumps(result))


@pytest.mark.skipif(not can_plot(), reason="needs the `bench` extra")
def test_pictures_are_written(tmp_path: Path) -> None:
    paths = save_plots([result_of(LOAD, [run(1.0), run(2.0)], FLOORS, RATES)], tmp_path)
    assert ["speed.png", "latency.png"] == [path.name for path in paths]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
