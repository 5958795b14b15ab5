"""Counter-based random numbers: Philox 4x32-10 written in int64 tensor arithmetic.

Owns the generator and the layout of its counter. Holds no state: a number is a function of (seed, choice, position,
lane), so neither batch composition, chunking, preemption nor replay can shift a stream. Every step is exact
integer arithmetic, hence equal on every device. Must not know what the numbers are for.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _high_low(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """32 x 32 -> 64 bit product as two words. int64 wraps, which keeps the product's bits; the mask undoes the sign."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over int64 tensors that hold 32-bit words (0 .. 2**32 - 1); all six broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(c0, _MULTIPLIERS[0])
        high1, low1 = _high_low(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(seed: Tensor, choice: Tensor, position: Tensor, lane: Tensor) -> Words:
    """Four independent 32-bit words per element, as int64.

    All arguments are int64 and broadcast. `seed` is the bit pattern of a uint64; `choice`, `position` and `lane` count
    in 32 bits.
    """
    counter = (lane & _MASK, position & _MASK, choice & _MASK, torch.zeros_like(lane))
    return philox(counter, (seed & _MASK, (seed >> 32) & _MASK))


def uniform(seed: Tensor, choice: Tensor, position: Tensor, lane: Tensor) -> Tensor:
    """float64 in [0, 1): 53 random bits, since float32 can't tell apart as many outcomes as a vocabulary's weights."""
    first, second, _, _ = words(seed, choice, position, lane)
    return ((first << 21) | (second >> 11)).to(torch.float64) * 2.0**-53
