"""How `bench` shows its figures: a block of text for people, and the JSON kept beside it.

Owns the layout of both and the fraction of the floor. Must not know how a figure came about.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from epicycle.tools.bench_stats import RunResult, median_of, sizes, summarise
from epicycle.tools.bench_workload import Workload
from epicycle.tools.floors import DeviceRates, Floors

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
TOLD = (("ttft_ms", "p50"), ("ttft_ms", "p95"), ("itl_ms", "p50"), ("itl_ms", "p95"))  # as ratios


def result_of(
    workload: Workload, runs: Sequence[RunResult], floors: Floors, rates: DeviceRates | None
) -> dict[str, Any]:
    """One workload's figures: every run, the medians over runs, and the floor where the device's rates are known."""
    summaries = [summarise(run) for run in runs]
    floor = None if rates is None or workload.kind == "sessions" else floor_of(workload, runs, floors, rates)
    return {
        "workload": workload.name,
        "definition": msgspec.to_builtins(workload),
        "runs": summaries,
        "median": median_of(summaries),
        "floor": floor,
    }


def floor_of(workload: Workload, runs: Sequence[RunResult], floors: Floors, rates: DeviceRates) -> dict[str, float]:
    """The serial floor of what was done, at the depths that were run, and the median share of it that was reached."""
    full = floors.spec.loops
    seconds = [floors.serial_s(rates, sizes(run.records, full), workload.wide) for run in runs]
    tokens = sum(len(one.token_s) for one in runs[0].records)
    walls = [_number(summarise(run)["wall_s"]) for run in runs]
    return {
        "serial_s": statistics.median(seconds),
        "serial_tokens_per_s": tokens / statistics.median(seconds),
        "fraction": statistics.median(floor / wall for floor, wall in zip(seconds, walls, strict=True)),
        "bytes_per_s": rates.bytes_per_s,
        "flop_per_s": rates.flop_per_s,
    }


def render(result: dict[str, Any]) -> str:
    """A block of lines for one workload."""
    median, runs = result["median"], result["runs"]
    lines = [
        f"{result['workload']}  ({len(runs)} runs, medians)",
        _line("tokens/s end to end", median["tokens_per_s"], [run["tokens_per_s"] for run in runs]),
        _line("tokens/s decoding", median["decode_tokens_per_s"], [run["decode_tokens_per_s"] for run in runs]),
        _line("loops per token", median["mean_loops"], []),
        f"  {'serial floor':22} {_floor(result)}",
        f"  {'ms':30} {'p50':>10} {'p95':>10} {'p99':>10}",
    ]
    for label, figures in median["latency"].items():
        lines += [_latency(label, name, figures[name]) for name in LATENCIES if figures[name]["count"]]
    counters = {name: value for name, value in median["counters"].items() if value}
    lines.append(f"  {'counters':22} " + ", ".join(f"{name} {value:,.6g}" for name, value in counters.items()))
    if "profile" in result:
        lines.append(render_profile(result["profile"]))
    for name, side in result.get("beside", {}).items():
        lines += ["  beside " + render(side).replace(result["workload"], name, 1), *_ratios(side)]
    return "\n".join(lines)


def _ratios(side: dict[str, Any]) -> list[str]:
    """The plain run over the side, figure by figure."""
    found, outputs = side["ratios"], side["outputs"]
    lines = [f"  plain / side: outputs equal in {outputs['equal']} of {outputs['of']} requests that both ran"]
    for name in ("tokens_per_s", "decode_tokens_per_s"):
        lines += [f"    {name:24} {found[name]:.3f}"] if name in found else []
    computed = found.get("counters", {}).get("prompt_tokens_computed")
    lines += [f"    {'prompt tokens computed':24} {computed:.3f}"] if computed else []
    for label, figures in found.get("latency", {}).items():
        shown = [f"{name.removesuffix('_ms')} {cut} {figures[name][cut]:.3f}" for name, cut in TOLD if name in figures]
        lines.append(f"    {label:24} " + ", ".join(shown))
    return lines


def _line(title: str, value: float | None, runs: Sequence[float | None]) -> str:
    if value is None:
        return f"  {title:22} not measured"
    spread = ", ".join(f"{run:,.2f}" for run in runs if run is not None)
    return f"  {title:22} {value:,.2f}" + (f"   [{spread}]" if spread else "")


def _floor(result: dict[str, Any]) -> str:
    floor = result["floor"]
    if floor is None:
        is_waiting = result["definition"]["kind"] == "sessions"
        return "none: waits are part of it" if is_waiting else "unknown device: give --bandwidth and --flops"
    return f"{floor['serial_tokens_per_s']:,.1f} tokens/s, of which {100 * floor['fraction']:.1f} % reached"


def _latency(label: str, name: str, cuts: dict[str, float]) -> str:
    shown = " ".join(f"{cuts[cut]:10,.1f}" for cut in ("p50", "p95", "p99"))
    return f"  {label:10} {name.removesuffix('_ms').upper():5} n={cuts['count']:<11,.0f} {shown}"


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value


def render_profile(found: dict[str, Any]) -> str:
    """Both windows of a profile, and the ticks by shape, as lines for people."""
    lines = []
    for name in ("prompts", "decode"):
        told = found[name]
        busy = 100 * told["kernel_ms"] / told["wall_ms"]
        head = f"  profile of {name}, {found['streams']} streams: {told['wall_ms']:,.1f} ms"
        lines.append(f"{head}, {busy:.1f} % of it in kernels")
        for row in told["kernels"]:
            name, share = row["kernel"][:48], 100 * row["share"]
            lines.append(f"    {name:48} {row['calls']:8,} {row['ms']:10,.2f} ms {share:5.1f} %")
    ticks = found["ticks"]
    lines.append(f"  {ticks['ticks']:,} ticks: {ticks['ms']:,.1f} ms, and {ticks['between_ms']:,.1f} ms between them")
    for row in ticks["shapes"]:
        name = f"{row['decode_rows']} decode rows, {row['prompt_rows']} prompt rows, {row['loops']} loops"
        lines.append(f"    {name:48} {row['ticks']:8,} {row['ms']:10,.2f} ms {row['mean_ms']:9.3f} each")
    return "\n".join(lines)
