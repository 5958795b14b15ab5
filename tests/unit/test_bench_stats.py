"""Figures from records."""

from __future__ import annotations

import pytest

from epicycle.tools.bench_load import Record
from epicycle.tools.bench_stats import (
    RunResult,
    derived,
    latencies,
    median_of,
    percentiles,
    shared_window,
    sizes,
    summarise,
)
from epicycle.tools.floors import SequenceSize


def record(submitted_s: float, *token_s: float, label: str = "stream", depths: tuple[int, ...] = ()) -> Record:
    return Record(label=label, prompt_tokens=10, submitted_s=submitted_s, token_s=list(token_s), depths=list(depths))


def test_percentiles_lie_between_neighbours() -> None:
    assert {"p50": 51.0, "p95": 96.0, "p99": 100.0, "count": 101} == percentiles([float(one) for one in range(1, 102)])
    assert {"p50": 1.5, "p95": pytest.approx(1.95), "p99": pytest.approx(1.99), "count": 2} == percentiles([2.0, 1.0])


def test_percentiles_of_nothing_are_only_a_count() -> None:
    assert {"count": 0} == percentiles([])


def test_latencies_come_from_token_times() -> None:
    found = latencies([record(1.0, 1.5, 1.6, 2.1)])
    middle = {name: round(cuts["p50"], 6) for name, cuts in found.items()}
    assert {"ttft_ms": 500.0, "tpot_ms": 300.0, "itl_ms": 300.0, "e2e_ms": 1100.0} == middle
    assert 2 == found["itl_ms"]["count"]


def test_one_token_has_no_steps() -> None:
    found = latencies([record(0.0, 1.0)])
    assert ({"count": 0}, {"count": 0}) == (found["tpot_ms"], found["itl_ms"])


def test_the_shared_window_holds_only_steps_of_everybody() -> None:
    records = [record(0.0, 1.0, 2.0, 3.0, 4.0), record(0.0, 2.0, 3.0, 4.0, 5.0)]
    assert 2.0 == shared_window(records)


def test_no_window_where_one_ends_before_another_begins() -> None:
    assert shared_window([record(0.0, 1.0, 2.0), record(0.0, 2.0, 3.0)]) is None


def test_a_run_in_numbers() -> None:
    records = [record(1.0, 2.0, 3.0, depths=(4, 2)), record(1.5, 2.5, 5.0, label="arrival", depths=(4, 3))]
    found = summarise(RunResult(records=records, counters={"ticks": 4.0, "rows_in_ticks": 10.0}))
    assert (4.0, 4, 20, 1.0, 3.25) == tuple(
        found[name] for name in ("wall_s", "output_tokens", "prompt_tokens", "tokens_per_s", "mean_loops")
    )
    assert {"stream", "arrival"} == set(found["latency"])  # type: ignore[call-overload]
    assert {"ticks": 4.0, "rows_in_ticks": 10.0, "mean_rows": 2.5} == found["counters"]


def test_a_graph_hit_rate_appears_with_its_counter() -> None:
    counters = {"ticks": 4.0, "rows_in_ticks": 12.0, "replays": 6.0, "eager_parts": 2.0}

    assert {"mean_rows": 3.0, "graph_hit_rate": 0.75} == derived(counters)
    assert {} == derived({})


def test_floors_count_the_mean_depth_of_decoded_tokens() -> None:
    records = [record(0.0, 1.0, 2.0, 3.0, depths=(4, 2, 3)), record(0.0, 1.0), record(0.0, 1.0, 2.0)]
    assert [SequenceSize(10, 3, 2.5), SequenceSize(10, 1, 4), SequenceSize(10, 2, 4)] == sizes(records, full_depth=4)


def test_medians_are_taken_at_every_number() -> None:
    runs = [{"a": one, "b": {"c": 10 - one}, "d": "x", "e": gap} for one, gap in ((1, 1.0), (5, None), (2, 3.0))]
    assert {"a": 2, "b": {"c": 8}, "d": "x", "e": None} == median_of(runs)
