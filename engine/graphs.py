"""CUDA graphs of the parts of device ticks: captured at the start over a ladder of shapes, replayed ever after.

Owns which parts are captured and in what order, the memory they share, and the counters. A part that has no graph is
launched step by step and counted. It must not know what a part does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from epicycle.engine.graph_runner import Part, RunCounters, count_work
from epicycle.engine.route import TickWork
from epicycle.engine.tick_inputs import Ladder, TickShape

MOST_GRAPHS = 384
GRAPH_BYTES = 4 << 20  # what the driver holds for one graph of some hundred nodes, at most
DRIVER_BYTES = 64 << 20  # what it may take or give back besides, such as for kernels that are loaded
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CaptureReport:
    graphs: int
    left_out: int
    seconds: float
    bytes: int
    has_driver_bytes: bool = True

    def line(self) -> str:
        left_out = f", {self.left_out} beyond the cap left out" if self.left_out else ""
        size = f"{self.bytes / 2**20:,.0f} MiB"
        if not self.has_driver_bytes:
            size += " and what the driver holds, which doesn't show while other processes use the card"
        return f"graphs: {self.graphs} captured in {self.seconds:.1f} s, {size}{left_out}"


def bytes_held(graphs: int, reserved: int, taken: int) -> tuple[int, bool]:
    """Bytes that so many graphs hold, and whether the driver's are among them.

    The allocator knows that it holds `reserved` more than before. What the driver holds shows only in the free memory
    of the card, which has `taken` less; other processes may have had a part in that.
    """
    is_ours = -DRIVER_BYTES <= taken - reserved <= graphs * GRAPH_BYTES + DRIVER_BYTES
    return (max(taken, reserved), True) if is_ours else (reserved, False)


@dataclass(slots=True)
class GraphRunner:
    """Meets `graph_runner.Runner`."""

    device: torch.device
    counters: RunCounters = field(default_factory=RunCounters)
    _graphs: dict[Part, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _is_capturing: bool = False
    _pool: tuple[int, int] | None = None

    def run(self, part: Part, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(part)
        if graph is not None:
            graph.replay()
            self.counters.replays += 1
        elif self._is_capturing:
            self._capture(part, launch)
        else:
            launch()
            self.counters.eager_parts += 1

    def count(self, work: TickWork, shape: TickShape) -> None:
        count_work(self.counters, work, shape)

    def capture(self, parts: list[Part], rehearse: Callable[[Part], None], on_progress: Progress) -> CaptureReport:
        """Capture `parts`, the important ones first; `rehearse` runs one of them with nobody in it."""
        started_s = time.perf_counter()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_reserved(self.device)
        taken = parts[:MOST_GRAPHS]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._is_capturing = True
        try:
            for number, part in enumerate(taken):
                if number % 16 == 0:
                    on_progress(f"capturing graphs: {number} of {len(taken)}")
                rehearse(part)
        finally:
            self._is_capturing = False
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free -= torch.cuda.mem_get_info(self.device)[0]
        reserved = torch.cuda.memory_reserved(self.device) - reserved
        held, is_whole = bytes_held(len(taken), reserved, free)
        return CaptureReport(len(taken), len(parts) - len(taken), time.perf_counter() - started_s, held, is_whole)

    def _capture(self, part: Part, launch: Callable[[], None]) -> None:
        launch()  # compiles and loads what the graph will hold
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
            launch()
        self._graphs[part] = graph


def parts_of(ladder: Ladder, *, has_prelude_layers: bool, has_coda_layers: bool) -> list[Part]:
    """What to capture, the most wanted first: decode alone, then prompts alone, then both together."""
    found: list[Part] = []
    for shapes in ladder.shapes():
        for shape in reversed(shapes):  # the largest first: the others then fit its memory
            found.extend(_parts_of(shape, has_prelude_layers, has_coda_layers))
    return list(dict.fromkeys(found))


def _parts_of(shape: TickShape, has_prelude_layers: bool, has_coda_layers: bool) -> Iterator[Part]:
    yield Part("loop", shape, True)
    if has_prelude_layers:
        yield Part("loop", shape, False)
    read = shape if has_coda_layers else TickShape(shape.decode_rows, 0)
    for name in ("greedy", "sampled"):
        if shape.prompt_rows:
            yield Part(name, read, True)
        if shape.decode_rows and (has_coda_layers or not shape.prompt_rows):
            yield Part(name, read, False)
    if not shape.prompt_rows:
        yield Part("token", shape)
