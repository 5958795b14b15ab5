"""How long the kernels of a piece of work ran on the GPU, and how long each tick.

Owns torch's profiler, and events around ticks. Must not know what the work is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from epicycle.engine.route import Resident, TickWork
from epicycle.engine.tick import Tick, Ticket


def kernel_times(work: Callable[[], None]) -> tuple[list[tuple[str, int, float]], float]:
    """Every kernel of `work` (its full name, calls, ms in all), and the wall time in ms until the last one was done."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started_s)
    return [(one.key, one.count, one.self_device_time_total / 1e3) for one in profiled.key_averages()], wall_ms


@dataclass(frozen=True, slots=True, order=True)
class TickRows:
    """What a tick is made of: rows, padding apart, and loops."""

    decode_rows: int
    prompt_rows: int
    loops: int


class TimedTicks:
    """Meets `tick.Tick` by another one, each of whose ticks it puts between two events of the device. Events are in
    stream order, so ticks that were launched ahead are measured as they ran."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self.most_chunks = tick.most_chunks
        self.takes_whole_tokens = tick.takes_whole_tokens
        self.most_prompt_rows = tick.most_prompt_rows
        self._timed: list[tuple[TickRows, torch.cuda.Event, torch.cuda.Event]] = []

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        return self._tick.prompt_room(decode_rows, rows)

    def drop(self, slot: int) -> None:
        self._tick.drop(slot)

    def launch_heads(self, residents: list[Resident]) -> Ticket:
        return self._tick.launch_heads(residents)

    def launch(self, work: TickWork) -> Ticket:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        ticket = self._tick.launch(work)
        end.record()
        self._timed.append((TickRows(len(work.decode), work.prompt_rows, work.loops), start, end))
        return ticket

    def times(self) -> tuple[list[tuple[TickRows, float]], list[float]]:
        """Every tick so far with its ms, and the ms between them; waits for the device."""
        torch.cuda.synchronize()
        between = [one[2].elapsed_time(other[1]) for one, other in zip(self._timed, self._timed[1:], strict=False)]
        return [(rows, start.elapsed_time(end)) for rows, start, end in self._timed], between
