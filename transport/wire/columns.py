"""Columns: arrays as little-endian bytes, so that a message costs one memcpy and not one object a number.

The stdlib's `array` and `memoryview.cast` read and write them; torch and numpy users go through `frombuffer`.
Every column of ours is one of the types below; hosts are little-endian (checked at import).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

assert sys.byteorder == "little", "epicycle's wire columns are little-endian and so must the host be"

I32 = "i"  # token ids, pages, slots, positions, counts
I64 = "q"
U64 = "Q"  # rids
F32 = "f"  # logprobs
U16 = "H"  # exit depths


def pack(code: str, values: Iterable[int] | Iterable[float]) -> bytes:
    """The bytes of `values` as type `code`. Raises OverflowError or TypeError on a value outside the type."""
    return array(code, values).tobytes()


def unpack(code: str, column: bytes) -> memoryview:
    """A read-only view of a column, one element per number. Raises TypeError when the length doesn't divide."""
    return memoryview(column).cast(code)  # type: ignore[call-overload, no-any-return]


def unpack_list(code: str, column: bytes) -> list[int]:
    """The integers of a column as a list, for code that is not on a hot path."""
    values: list[int] = unpack(code, column).tolist()
    return values
