"""How long the kernels of a piece of work ran on the GPU.

Owns torch's profiler. Must not know what the work is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernel_times(work: Callable[[], None]) -> tuple[list[tuple[str, int, float]], float]:
    """Every kernel of `work` (its full name, calls, ms in all), and the wall time in ms until the last one was done."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started_s)
    return [(one.key, one.count, one.self_device_time_total / 1e3) for one in profiled.key_averages()], wall_ms
