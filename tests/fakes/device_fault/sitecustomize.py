"""Breaks an executor's device once: Python imports this at start wherever its folder is on PYTHONPATH.

`EPICYCLE_TEST_FAULT` is TICK:FILE. The first executor that launches so many ticks and finds no FILE makes it and fails:
on a GPU by a kernel that reads out of bounds, on a CPU by what torch raises for one. Other processes don't notice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def arm(tick_to_break: int, marker: Path) -> None:
    import torch

    from epicycle.engine.device_tick import DeviceTick

    launch, ticks = DeviceTick._launch, iter(range(1 << 30))

    def break_once(self, work):
        ticket = launch(self, work)
        if next(ticks) < tick_to_break or marker.exists():
            return ticket
        marker.touch()
        if self._slots.device.type == "cpu":
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.zeros(1, device=self._slots.device)[torch.tensor([5], device=self._slots.device)]
        return ticket

    DeviceTick._launch = break_once


if "EPICYCLE_TEST_FAULT" in os.environ and "epicycle.actors.executor" in sys.orig_argv:
    _tick, _, _file = os.environ["EPICYCLE_TEST_FAULT"].partition(":")
    arm(int(_tick), Path(_file))
