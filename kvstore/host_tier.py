"""Prefix pages on the host: what the pool gave up and may still be had by a copy instead of being computed.

A key stands for a page's tokens and everything before them, as in the prefix index. The least recently used gives way;
what is being copied to the device stays. Owns which host page holds which key; must not know device pages, requests, or
when copies are done, as they run in the order in which they are asked for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class HostTier:
    """Host pages first .. first + count - 1. `most_in_flight`: pages on their way to the host at once."""

    def __init__(self, first: int, count: int, most_in_flight: int) -> None:
        self.total_pages = count
        self.spilled_pages = 0  # so far
        self._free = list(range(first + count - 1, first - 1, -1))
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # the next to give way first
        self._locks: Counter[bytes] = Counter()
        self._most_in_flight = most_in_flight
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._pages)

    def arrived(self, pages: int) -> None:
        """So many spilled pages have arrived, of all there ever were."""
        self._arrived = pages

    def spill(self, key: bytes) -> int | None:
        """A host page for a page that the pool gives up; None where it is there already, or there is no room now."""
        if not self.total_pages:
            return None
        if key in self._pages:
            self._pages.move_to_end(key)
            return None
        if self.spilled_pages - self._arrived >= self._most_in_flight or not self._make_room():
            return None
        self.spilled_pages += 1
        page = self._pages[key] = self._free.pop()
        return page

    def _make_room(self) -> bool:
        if not self._free:
            oldest = next((key for key in self._pages if key not in self._locks), None)
            if oldest is not None:
                self._free.append(self._pages.pop(oldest))
        return bool(self._free)

    def hits(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are here."""
        return next((place for place, key in enumerate(keys) if key not in self._pages), len(keys))

    def lock(self, keys: Sequence[bytes]) -> list[int]:
        """The host pages of keys that are here; they stay until `unlock`."""
        for key in keys:
            self._locks[key] += 1
            self._pages.move_to_end(key)
        return [self._pages[key] for key in keys]

    def unlock(self, keys: Sequence[bytes]) -> None:
        self._locks.subtract(keys)
        for key in keys:
            if not self._locks[key]:
                del self._locks[key]

    def reset(self) -> None:
        """Forget what nobody is copying."""
        for key in [key for key in self._pages if key not in self._locks]:
            self._free.append(self._pages.pop(key))
