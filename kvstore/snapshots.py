"""Host pages of saved requests: how many there are, and whose each is.

A saved request owns as many host pages as its table has pages that hold anything; they are named when its row is taken
off the device, before anybody knows how many that will be, and the rest come back once it has been copied. Owns the
counts of one executor's host memory; must not know device pages, tokens, or when copies are done.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from epicycle.kvstore.ledger import Ledger


class HostCensus(msgspec.Struct, frozen=True, kw_only=True):
    """Host pages by class; `is_even` when they sum to the total."""

    saved_pages: int
    free_pages: int
    total_pages: int

    @property
    def is_even(self) -> bool:
        return self.saved_pages + self.free_pages == self.total_pages


class Snapshots:
    """Host pages 0..total-1, each as big as one of the pool; 0 of them save nobody."""

    def __init__(self, total_pages: int) -> None:
        self._ledger = Ledger(total_pages) if total_pages else None
        self._owners: set[Hashable] = set()

    def __len__(self) -> int:
        """Requests that hold host pages."""
        return len(self._owners)

    @property
    def total_pages(self) -> int:
        return self._ledger.total_pages if self._ledger is not None else 0

    @property
    def free_pages(self) -> int:
        return self._ledger.free_pages if self._ledger is not None else 0

    def begin(self, owner: Hashable, pages: int) -> tuple[int, ...]:
        """Host pages for the owner's whole table; the caller has seen that so many are free."""
        assert self._ledger is not None and 0 < pages <= self.free_pages, (pages, self.free_pages)
        self._owners.add(owner)
        return self._ledger.claim(owner, pages)

    def complete(self, owner: Hashable, pages: int) -> None:
        """The owner has been copied and needs the first `pages` only."""
        assert self._ledger is not None
        self._ledger.trim(owner, pages)

    def pages_of(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's host pages in the order of its table."""
        return self._ledger.pages_of(owner) if self._ledger is not None else ()

    def drop(self, owner: Hashable) -> None:
        """The owner has gone back to the device, or for good. Unknown owners are ignored.

        Its host pages may be given away at once, since the executor copies in the order in which it is told.
        """
        self._owners.discard(owner)
        if self._ledger is not None:
            self._ledger.release(owner)

    def census(self) -> HostCensus:
        """Counted from the owners; O(pages)."""
        saved = sum(len(self.pages_of(owner)) for owner in self._owners)
        return HostCensus(saved_pages=saved, free_pages=self.free_pages, total_pages=self.total_pages)
