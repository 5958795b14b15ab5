"""What tools ask of the machine behind an engine: the device's name, and its memory back once an engine is gone.

Must not know engines.
"""

from __future__ import annotations

import gc
import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: str) -> str:
    """Of `device` as torch writes it: the GPU's name, or the CPU's model and the number of its cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()} ({len(models)} cores)"


def give_back_memory() -> None:
    """Free what nobody refers to, so that the next engine finds it when it asks what is free."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no GPU is in use
