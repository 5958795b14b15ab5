"""What the kernel benchmark measures with, and against: random weights and the card's own ceilings."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from epicycle.engine.kernels.graph_times import graph_us


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
