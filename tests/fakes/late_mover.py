"""A page mover whose copies come late, as a GPU's do: each happens, in order, only after a few looks at it.

So whoever lets go of a page too early, or uses one too soon, gets wrong bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epicycle.engine.engine import Engine
from epicycle.engine.host_pages import PageMover


@dataclass
class LateCopies:
    copy: Callable[[], object]
    looks_left: int
    is_done: bool = False

    def is_complete(self) -> bool:
        return self.is_done


class LateMover:
    """Meets `PageMover` over another."""

    def __init__(self, mover: PageMover, looks: int) -> None:
        self.total_pages = mover.total_pages
        self.saved_pages = 0
        self.loaded_pages = 0
        self._mover = mover
        self._looks = looks
        self._waiting: deque[LateCopies] = deque()

    def save(self, pages: Sequence[int], host_pages: Sequence[int]) -> LateCopies:
        self.saved_pages += len(pages)
        return self._ask(lambda: self._mover.save(pages, host_pages))

    def spill(self, pages: Sequence[int], host_pages: Sequence[int]) -> LateCopies:
        """Staged at once, as a GPU does in stream order; on the host late."""
        self._mover.save(pages, host_pages)
        return self._ask(lambda: None)

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> LateCopies:
        self.loaded_pages += len(pages)
        return self._ask(lambda: self._mover.load(host_pages, pages))

    def _ask(self, copy: Callable[[], object]) -> LateCopies:
        copies = LateCopies(copy, self._looks)
        self._waiting.append(copies)
        return copies

    def advance(self) -> None:
        if self._waiting:
            first = self._waiting[0]
            first.looks_left -= 1
            if first.looks_left < 0:
                first.copy()
                first.is_done = True
                self._waiting.popleft()


def make_copies_late(engine: Engine, looks: int) -> LateMover:
    mover = LateMover(engine._mover, looks)
    engine._mover = mover
    return mover
