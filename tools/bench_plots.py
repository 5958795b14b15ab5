"""Pictures of a bench report: speed against the floor, and latency percentiles.

Needs the `bench` extra (matplotlib); `can_plot` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from epicycle.tools.bench_report import LATENCIES

MISSING = "no plots: matplotlib isn't installed (pip install 'epicycle[bench]')"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def save_plots(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write speed.png and latency.png; returns their paths. Call only where `can_plot`."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    paths = [folder / "speed.png", folder / "latency.png"]
    for path, draw in zip(paths, (_speed, _latency), strict=True):
        figure, axes = plt.subplots(figsize=(max(6.0, 1.2 * len(results) + 3), 4.5), layout="constrained")
        draw(axes, results)
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return paths


def _speed(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Bars of medians with the range of the runs; the floor as a mark above each."""
    for place, result in enumerate(results):
        runs = [run["tokens_per_s"] for run in result["runs"]]
        middle = result["median"]["tokens_per_s"]
        axes.bar(place, middle, yerr=[[middle - min(runs)], [max(runs) - middle]], color="tab:blue", capsize=4)
        if result["floor"]:
            axes.plot(place, result["floor"]["serial_tokens_per_s"], marker="_", color="black", markersize=24)
    _name(axes, results, "output tokens/s end to end (mark: serial floor)")


def _latency(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """p50 as a dot and p99 as the top of a line, for each latency of each workload's first label."""
    for shift, name in enumerate(LATENCIES):
        for place, result in enumerate(results):
            cuts = next(iter(result["median"]["latency"].values()))[name]
            if not cuts["count"]:
                continue
            x = place + 0.18 * (shift - 1.5)
            label = name.removesuffix("_ms").upper() if place == 0 else None
            axes.vlines(x, cuts["p50"], cuts["p99"], color=f"C{shift}")
            axes.plot(x, cuts["p50"], marker="o", color=f"C{shift}", linestyle="", label=label)
    axes.set_yscale("log")
    axes.legend()
    _name(axes, results, "ms, p50 to p99")


def _name(axes: Any, results: Sequence[dict[str, Any]], title: str) -> None:
    axes.set_xticks(range(len(results)), [result["workload"] for result in results], rotation=30, ha="right")
    axes.set_ylabel(title)
