"""Where a workload's time goes on a GPU: its kernels' times while streams read their prompts, and while they decode.

Owns the two windows and the table of kernels. A window is one wave of the workload's streams, a few tokens each: enough
to see shares, and few enough launches to keep. The whole workload is run once more for the times of its ticks. It must
not know what a kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from epicycle.engine.engine import Engine
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.profiling import TickRows, TimedTicks, kernel_times
from epicycle.engine.tick import Tick
from epicycle.tools.bench_engine import as_request, drive, streams_that_fit
from epicycle.tools.bench_load import Load
from epicycle.tools.bench_workload import Workload, WorkloadError
from epicycle.tools.offline import Offline

OUTPUT = 9  # tokens: one from the prompt, eight decoded
MOST_KERNELS, MOST_SHAPES = 24, 16
_NAMES = re.compile(r"^void |^at::native::|<.*|\(.*")


def profile_windows(engine: Engine, workload: Workload, spec: ModelSpec, seed: int) -> dict[str, Any]:
    """`prompts` and `decode`, each as `window` tells, and `ticks` as `tick_table` does. Raises WorkloadError where
    there is no GPU, or no streams."""
    if engine.device.type != "cuda":
        raise WorkloadError("--profile needs a GPU")
    if workload.kind == "sessions":
        raise WorkloadError(f"--profile: {workload.name} is made of conversations; profile a workload of streams")
    load = Load(msgspec.structs.replace(workload, output=min(OUTPUT, workload.output)), spec, seed)
    streams = streams_that_fit(engine, load)
    for is_told in (False, True):  # the first time warms up
        offline = Offline(engine)
        replies = [offline.submit(as_request(load.stream(number), is_held=True)) for number in range(streams)]

        def read_prompts(offline: Offline = offline, replies: Any = replies) -> None:
            while not all(reply.tokens for reply in replies):
                offline.step()

        def decode(offline: Offline = offline) -> None:
            offline.release_held()
            while offline.step():
                pass

        if not is_told:
            read_prompts()
            decode()
            continue
        found = {"streams": streams, "prompts": window(read_prompts), "decode": window(decode)}
    return found | {"ticks": time_ticks(engine, Load(workload, spec, seed))}


def time_ticks(engine: Engine, load: Load) -> dict[str, Any]:
    """The workload's ticks by shape."""
    watched: list[TimedTicks] = []

    def watch(tick: Tick) -> Tick:
        watched.append(TimedTicks(tick))
        return watched[0]

    drive(Offline(engine, watch=watch), load)
    return tick_table(*watched[0].times())


def window(work: Callable[[], None]) -> dict[str, Any]:
    """Wall and kernel time of `work` in ms, and its kernels: name, calls, ms, share of the wall time."""
    return table(*kernel_times(work))


def table(kernels: list[tuple[str, int, float]], wall_ms: float) -> dict[str, Any]:
    """Kernels (name, calls, ms) of one short name together, the longest first."""
    groups: dict[str, list[float]] = {}
    for name, calls, ms in kernels:
        entry = groups.setdefault(_NAMES.sub("", name) or name, [0.0, 0.0])
        entry[0] += calls
        entry[1] += ms
    longest = sorted(groups.items(), key=lambda item: -item[1][1])
    rows = [
        {"kernel": name, "calls": int(calls), "ms": ms, "share": ms / wall_ms} for name, (calls, ms) in longest if ms
    ]
    return {"wall_ms": wall_ms, "kernel_ms": sum(ms for _, _, ms in kernels), "kernels": rows[:MOST_KERNELS]}


def tick_table(ticks: list[tuple[TickRows, float]], between_ms: list[float]) -> dict[str, Any]:
    """Ticks (shape, ms) of one shape together, those that took longest first; and the time between ticks, in ms."""
    groups: dict[TickRows, list[float]] = {}
    for shape, ms in ticks:
        groups.setdefault(shape, []).append(ms)
    longest = sorted(groups.items(), key=lambda item: (-sum(item[1]), item[0]))
    rows = [
        {
            "decode_rows": shape.decode_rows,
            "prompt_rows": shape.prompt_rows,
            "loops": shape.loops,
            "ticks": len(times),
            "ms": sum(times),
            "mean_ms": sum(times) / len(times),
        }
        for shape, times in longest
    ]
    return {
        "ms": sum(ms for _, ms in ticks),
        "between_ms": sum(between_ms),
        "ticks": len(ticks),
        "shapes": rows[:MOST_SHAPES],
    }
