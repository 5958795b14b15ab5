"""Timing on a GPU for the kernel benchmark: CUDA graphs, cold weights, the card's own ceilings.

Owns how a time is taken and nothing about what is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

COLD_BYTES = 200 << 20  # rotate over at least this much: three times the L2 cache of an H200
Launch = Callable[[], object]


def graph_us(launches: Sequence[Launch], replays: int = 7) -> float:
    """Median microseconds of ONE launch, from replays of a graph that holds all of them."""
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
    for _ in range(2):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000 / len(launches))
    return statistics.median(times)


def copies_of(size_bytes: int) -> int:
    """How many weights of this size to rotate over so that none is in a cache."""
    return max(2, min(32, -(-COLD_BYTES // size_bytes)))


def random_weights(rows: int, inputs: int, copies: int) -> list[Tensor]:
    """bfloat16 matrices with products of unit variance."""
    scale = inputs**-0.5
    made = []
    for _ in range(copies):
        weight = torch.empty(rows, inputs, dtype=torch.bfloat16, device="cuda")
        made.append(weight.normal_(0.0, scale))
    return made


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read plus written) and the library's bfloat16 rate in TFLOP/s, both on random data."""
    source = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_us = graph_us([partial(target.copy_, source)], replays=5)
    moved = 2 * source.numel() * 2
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_us = graph_us([partial(torch.matmul, a, b)] * 3, replays=5)
    return {"copy_tb_s": moved / copy_us / 1e6, "matmul_tflop_s": 2 * 8192**3 / product_us / 1e6}
