"""Times on a GPU: launches in CUDA graphs, one way after the other, in turn, or without a rest.

Owns how a time is taken and nothing about what is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

COLD_BYTES = 200 << 20  # rotate over at least this much: three times the L2 cache of an H200
Launch = Callable[[], object]


def copies_of(size_bytes: int) -> int:
    """How many weights of this size to rotate over so that none is in a cache."""
    return max(2, min(32, -(-COLD_BYTES // size_bytes)))


def graph_us(launches: Sequence[Launch], replays: int = 7) -> float:
    """Median microseconds of ONE launch, from replays of a graph that holds all of them."""
    return graphs_us({"": launches}, replays)[""]


def graphs_us(ways: Mapping[str, Sequence[Launch]], replays: int = 7) -> dict[str, float]:
    """As `graph_us` of several ways, whose replays take turns."""
    graphs = {name: _captured(launches) for name, launches in ways.items()}
    for graph in [*graphs.values()] * 2:
        graph.replay()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(replays):
        for name, graph in graphs.items():
            times[name].append(_replay_us(graph) / len(ways[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def sustained_us(ways: Mapping[str, Sequence[Launch]], seconds: float = 0.7) -> dict[str, list[float]]:
    """Each way's replays for so long without a rest, forth and then back: medians of the second halves, one for each.
    Where power is what limits, every way has the clock that it leaves itself."""
    graphs = {name: _captured(launches) for name, launches in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways, *reversed([*ways])]:
        marks = _events(max(4, int(1e6 * seconds / _replay_us(graphs[name]))) + 1)
        marks[0].record()
        for mark in marks[1:]:
            graphs[name].replay()
            mark.record()
        torch.cuda.synchronize()
        times = [1000 * float(one.elapsed_time(other)) for one, other in pairwise(marks)]
        found[name].append(statistics.median(times[len(times) // 2 :]) / len(ways[name]))
    return found


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = _events(2)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * float(start.elapsed_time(end))


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _captured(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph
