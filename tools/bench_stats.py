"""From records to figures: rates, latencies as percentiles, loops, and medians over runs.

Owns the definitions of every figure `bench` prints. Pure functions of numbers; must not know engines or servers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from epicycle.tools.bench_load import Record
from epicycle.tools.floors import SequenceSize

PERCENTILES = (50, 95, 99)
FIRST_TURN, LATER_TURNS = "turn 1", "turns 2+"
Latencies = dict[str, dict[str, float]]  # figure -> percentile -> milliseconds


@dataclass(kw_only=True)
class RunResult:
    """One timed run. `decode_tokens_per_s` None: no window of this run holds decode rows alone."""

    records: list[Record]
    decode_tokens_per_s: float | None = None
    decode_streams: int = 0
    counters: dict[str, float] = field(default_factory=dict)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`p50`, `p95`, `p99` (linear between neighbours) and `count`; only the count of nothing."""
    if not values:
        return {"count": 0}
    cuts = np.percentile(values, PERCENTILES)
    return {f"p{cut}": float(value) for cut, value in zip(PERCENTILES, cuts, strict=True)} | {"count": len(values)}


def latencies(records: Sequence[Record]) -> Latencies:
    """TTFT, TPOT, ITL and E2E. TPOT is a request's mean step after its first token, ITL every single step."""
    longer = [one for one in records if len(one.token_s) > 1]
    tpot = [(one.token_s[-1] - one.token_s[0]) / (len(one.token_s) - 1) for one in longer]
    itl = [after - before for one in records for before, after in pairwise(one.token_s)]
    figures = {
        "ttft_ms": [one.token_s[0] - one.submitted_s for one in records],
        "tpot_ms": tpot,
        "itl_ms": itl,
        "e2e_ms": [one.token_s[-1] - one.submitted_s for one in records],
    }
    return {name: percentiles([1e3 * value for value in values]) for name, values in figures.items()}


def wall_s(records: Sequence[Record]) -> float:
    """From the first submission to the last token."""
    return max(one.token_s[-1] for one in records) - min(one.submitted_s for one in records)


def mean_loops(records: Sequence[Record]) -> float | None:
    """Loops per output token, the prompts' first outputs included; None where nobody told."""
    depths = [depth for one in records for depth in one.depths]
    return statistics.fmean(depths) if depths else None


def shared_window(records: Sequence[Record]) -> float | None:
    """Tokens a second while every request decodes: from the last first token to the first last one. None: no such."""
    begin, end = max(one.token_s[0] for one in records), min(one.token_s[-1] for one in records)
    if end <= begin:
        return None
    return sum(begin < time_s <= end for one in records for time_s in one.token_s) / (end - begin)


def sizes(records: Sequence[Record], full_depth: int) -> list[SequenceSize]:
    """What the floors count. A request's decoded tokens are those after its first."""
    return [
        SequenceSize(one.prompt_tokens, len(one.token_s), statistics.fmean(one.depths[1:] or [full_depth]))
        for one in records
    ]


def summarise(result: RunResult) -> dict[str, object]:
    """Every figure of one run, as JSON."""
    records = result.records
    seconds, tokens = wall_s(records), sum(len(one.token_s) for one in records)
    return {
        "wall_s": seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(one.prompt_tokens for one in records),
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "decode_streams": result.decode_streams,
        "mean_loops": mean_loops(records),
        "latency": {label: latencies(group) for label, group in groups(records).items()},
        "counters": result.counters | derived(result.counters),
    }


def groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by label; of conversations, all turns but the first together besides."""
    found: dict[str, list[Record]] = {}
    for one in records:
        found.setdefault(one.label, []).append(one)
    if FIRST_TURN in found and len(found) > 1:
        found[LATER_TURNS] = [one for one in records if one.label != FIRST_TURN]
    return found


def derived(counters: Mapping[str, float]) -> dict[str, float]:
    """Ratios of counters that are there."""
    ticks = counters.get("ticks", 0)
    if not ticks:
        return {}
    ratios = {"mean_rows": counters.get("rows_in_ticks", 0.0) / ticks}
    if "prefix_hit_tokens" in counters:
        ratios["prompt_tokens_computed"] = counters.get("prompt_tokens", 0.0) - counters["prefix_hit_tokens"]
    parts = counters.get("replays", 0.0) + counters.get("eager_parts", 0.0)
    if parts:
        ratios["graph_hit_rate"] = counters["replays"] / parts
    return ratios


def median_of(runs: Sequence[object]) -> object:
    """The same structure with the median at every number. None where a run has none; other values from the first."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: median_of([run.get(key) for run in runs if isinstance(run, dict)]) for key in first}
    numbers = [run for run in runs if isinstance(run, int | float)]
    if len(numbers) < len(runs):
        return None if any(run is None for run in runs) else first
    return statistics.median(numbers)
