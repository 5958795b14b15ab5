"""Start-state noise: a pure function of (seed, position, lane), whatever else is in the batch.

Owns the counter-based hash and the map from hash bits to a truncated normal. The map is a table of quantiles that the
top 16 bits of the hash index, so a draw is integer arithmetic and one gather: the bits are equal on every device, in
every packing, and in a kernel that repeats the same integer steps. It knows nothing of models, requests or dtypes.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

TABLE_BITS = 16
BOUND_STD = 3.0  # the normal is cut at this many standard deviations on both sides

# Odd 64-bit multipliers, written as the signed integers that int64 tensors hold.
SEED_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
POSITION_STEP = 0xD1342543DE82EF95 - (1 << 64)
LANE_STEP = 0xA0761D6478BD642F - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)


def quantile_table(std: float, scale: float, device: torch.device | str = "cpu") -> Tensor:
    """[65536] float32: quantiles of a normal of `std` cut at +-3 std, at the middle of each equal slice, times `scale`.

    Computed with double precision on the host, so that every device holds the same bits.
    """
    normal = NormalDist()
    low = normal.cdf(-BOUND_STD)
    inside = 1.0 - 2.0 * low
    size = 1 << TABLE_BITS
    half = [scale * std * normal.inv_cdf(low + inside * (i + 0.5) / size) for i in range(size // 2)]
    values = half + [-value for value in reversed(half)]  # exactly symmetric
    return torch.tensor(values, dtype=torch.float32, device=device)


def draw(table: Tensor, seeds: Tensor, positions: Tensor, width: int) -> Tensor:
    """Values [N, width] float32 for rows with seeds [N] and positions [N] (both int64)."""
    key = _mix(_mix(seeds * SEED_STEP) + positions * POSITION_STEP)
    lanes = torch.arange(1, width + 1, dtype=torch.int64, device=seeds.device)
    words = _mix(key.unsqueeze(1) + lanes * LANE_STEP)
    return table[_shift_right(words, 64 - TABLE_BITS)]


def _mix(x: Tensor) -> Tensor:
    """A bijective scramble of 64 bits: two rounds of xor-shift and multiply, then a last xor-shift."""
    x = (x ^ _shift_right(x, 30)) * MIX_A
    x = (x ^ _shift_right(x, 27)) * MIX_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 shifts keep the sign, so the copies of it are masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
