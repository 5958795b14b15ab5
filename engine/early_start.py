"""Whether a launch may start while the one before it still runs, and if not, why.

Owns what that takes of a card and its driver. Must not know kernels, and imports no Triton.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

LEAST_CAPABILITY = (9, 0)
LEAST_DRIVER = (12, 3)  # from here on graphs may hold such launches


def why_late(capability: tuple[int, int], driver: tuple[int, int]) -> str:
    """What is missing on a card of this compute capability, under a driver for CUDA of this version; empty if
    nothing."""
    if capability < LEAST_CAPABILITY:
        return f"a card of capability {_dotted(capability)}, and that takes {_dotted(LEAST_CAPABILITY)}"
    if driver < LEAST_DRIVER:
        return f"a driver for CUDA {_dotted(driver)}, and that takes {_dotted(LEAST_DRIVER)} in a graph"
    return ""


@cache
def late_reason(device: torch.device) -> str:
    """`why_late` of `device`, a GPU."""
    return why_late(torch.cuda.get_device_capability(device), driver_version())


@cache
def driver_version() -> tuple[int, int]:
    """The CUDA version that the installed driver is made for; (0, 0) where none answers."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return (0, 0)
    return version_of(version.value)


def version_of(number: int) -> tuple[int, int]:
    """As CUDA counts: 12030 is 12.3."""
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
