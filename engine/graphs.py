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
    unexplained_bytes: int = 0  # by which the card has less free memory, or more, than graphs can have taken

    def line(self) -> str:
        told = f"graphs: {self.graphs} captured in {self.seconds:.1f} s, {self.bytes / 2**20:,.0f} MiB"
        if self.left_out:
            told += f", {self.left_out} beyond the cap left out"
        if self.unexplained_bytes:
            change = f"{self.unexplained_bytes / 2**20:,.0f} MiB"
            told += f"; the card has {change} less besides, which graphs don't explain: do other processes use it?"
        return told


def bytes_held(graphs: int, reserved: int, taken: int) -> tuple[int, int]:
    """Bytes that so many graphs hold, and bytes that they don't explain.

    The allocator knows that it holds `reserved` more than before. What the driver holds shows only in the free memory
    of the card, which has `taken` less; other processes may have had a part in that.
    """
    besides = taken - reserved
    is_ours = -DRIVER_BYTES <= besides <= graphs * GRAPH_BYTES + DRIVER_BYTES
    return (max(taken, reserved), 0) if is_ours else (reserved, besides)


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
        free, reserved = self._memory()
        wanted = parts[:MOST_GRAPHS]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._is_capturing = True
        try:
            for number, part in enumerate(wanted):
                if number % 16 == 0:
                    on_progress(f"capturing graphs: {number} of {len(wanted)}")
                rehearse(part)
        finally:
            self._is_capturing = False
        free_after, reserved_after = self._memory()
        held, unexplained = bytes_held(len(wanted), reserved_after - reserved, free - free_after)
        seconds = time.perf_counter() - started_s
        return CaptureReport(len(wanted), len(parts) - len(wanted), seconds, held, unexplained)

    def _memory(self) -> tuple[int, int]:
        """Bytes that are free on the card, and that the allocator holds without what it merely keeps."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_reserved(self.device)

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
