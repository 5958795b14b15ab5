"""Token ids for prompts that a trace tells only as hashes or lengths.

Equal hashes of one scope give equal blocks, whoever asks and in whatever order; another salt gives other blocks
everywhere. A position's id is a 64-bit mix of (salt, stream, position), so nothing is remembered. Ids go to the server
as they are: there is no text whose tokens could come out otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Mixed = NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Synthesis:
    """`vocabulary` ids without `special_ids`, under one salt."""

    def __init__(self, salt: str, vocabulary: int, special_ids: Sequence[int] = ()) -> None:
        self._salt = salt
        self._ids = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.asarray(special_ids, dtype=np.int32))

    def blocks(self, scope: str, hashes: Sequence[int], block_size: int, length: int) -> array[int]:
        """The `length` tokens of a prompt whose blocks these hashes name; the last one is cut or, if short, goes on."""
        missing = max(0, -(-length // block_size) - len(hashes))
        # A trace may leave out the last, partial block: what nobody shares belongs to the prompt's last hash.
        extra = [self._key("rest", scope, str(hashes[-1]), str(number)) for number in range(missing)]
        key = self._key("blocks", scope)
        streams = np.array([*(_fold(key, one) for one in hashes), *extra], dtype=np.uint64)
        positions = np.arange(block_size, dtype=np.uint64)
        return self._pick(_mix(streams[:, None] + positions[None, :] * GOLDEN).reshape(-1)[:length])

    def stream(self, name: str, start: int, count: int) -> array[int]:
        """`count` ids of an endless stream called `name`, from position `start`."""
        positions = np.arange(start, start + count, dtype=np.uint64)
        return self._pick(_mix(np.uint64(self._key("stream", name)) + positions * GOLDEN))

    def _pick(self, mixed: Mixed) -> array[int]:
        picked = self._ids[(mixed % np.uint64(len(self._ids))).astype(np.int64)]
        return array("i", picked.tobytes())

    def _key(self, *parts: str) -> int:
        return int.from_bytes(blake2b("\0".join((self._salt, *parts)).encode(), digest_size=8).digest(), "little")


def _fold(key: int, value: int) -> int:
    """One 64-bit number of two, mixed so that neighbouring hashes share nothing."""
    mixed = (key ^ (value * 0xD6E8FEB86659FD93)) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 32
    return (mixed * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF


def _mix(values: Mixed) -> Mixed:
    values = (values ^ (values >> np.uint64(30))) * MIX[0]
    values = (values ^ (values >> np.uint64(27))) * MIX[1]
    return values ^ (values >> np.uint64(31))
