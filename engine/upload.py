"""Values on their way to the device and back, without waiting for what runs there.

Owns the one way to do it: on a GPU the values are staged in pinned memory and copied in stream order; the allocator
keeps the staging until the copy is done. Must not know what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on `device`. The host doesn't wait; work launched later on the stream sees the values."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """A copy on the host, complete once everything launched so far is."""
    if values.device.type != "cuda":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
