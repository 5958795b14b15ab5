"""The ledger: who holds which page of one device's pool.

A page is free exactly when nothing counts on it. Four kinds of holders count: rows (a request's page table), leases
(transfers in flight), prefix entries and snapshots being copied out. A release therefore frees a page only when the
last of them has let go, which is all that sharing a prefix, n > 1 and delayed frees need.

Owns the free list and the counts; one actor calls it. Must not know page contents, planes, bytes or messages.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from epicycle.kvstore.errors import OwnerConflict, PagesImpossible, PoolShort


class Hold(enum.Enum):
    """Why a page outside any row stays put."""

    LEASE = "leased"
    PREFIX = "prefix_only"
    SNAPSHOT = "snapshotting"


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """Every page counted once, as the first that applies: leased, live, prefix-only, snapshotting, free.

    `miscounted` are pages whose reference count differs from their holders. Free pages are counted on the free list and
    the rest from the holders, so a page that leaked or is both shows as a sum that is not the total.
    """

    leased_pages: int
    live_pages: int
    prefix_only_pages: int
    snapshotting_pages: int
    free_pages: int
    total_pages: int
    miscounted_pages: int

    @property
    def sum_pages(self) -> int:
        return self.leased_pages + self.live_pages + self.prefix_only_pages + self.snapshotting_pages + self.free_pages

    @property
    def is_even(self) -> bool:
        return self.sum_pages == self.total_pages and self.miscounted_pages == 0

    def line(self) -> str:
        """One line for the log; it starts with UNEVEN when the books do not balance."""
        marker = "census" if self.is_even else "UNEVEN census"
        return (
            f"{marker}: leased {self.leased_pages} + live {self.live_pages} + prefix-only {self.prefix_only_pages} "
            f"+ snapshotting {self.snapshotting_pages} + free {self.free_pages} = {self.sum_pages} "
            f"of {self.total_pages} pages, {self.miscounted_pages} miscounted"
        )


class Ledger:
    """Pages 0..total-1. Every call either does all it says or raises a KvError and changes nothing."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise PagesImpossible(f"a pool of {total_pages} pages; it needs at least 1: give KV more memory")
        # A stack, deepest last: pops ascend, and a freed run is pushed backwards so that it pops in order again.
        # Neighbouring pages of one request let transfers merge into long segments.
        self._free = list(range(total_pages - 1, -1, -1))
        self._refs = [0] * total_pages
        self._rows: dict[Hashable, list[int]] = {}
        self._holds: dict[int, tuple[Hold, tuple[int, ...]]] = {}
        self._next_hold = 1

    @property
    def total_pages(self) -> int:
        return len(self._refs)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.total_pages - self.free_pages

    def pages_of(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's page table in position order; empty for an unknown owner."""
        return tuple(self._rows.get(owner, ()))

    def refs(self, page: int) -> int:
        """How many holders count on the page; 0 means free."""
        return self._refs[page]

    def claim(self, owner: Hashable, fresh_pages: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Open a page table: the `shared` pages first (held by someone already), then fresh ones. Returns all of it.

        Raises OwnerConflict (owner has a table), PagesImpossible (bad count or shared page) or PoolShort.
        """
        if owner in self._rows:
            raise OwnerConflict(f"owner {owner!r} already holds {len(self._rows[owner])} pages; release it first")
        if fresh_pages + len(shared) < 1:
            raise PagesImpossible(f"owner {owner!r} claims {fresh_pages} fresh and {len(shared)} shared pages")
        self._check_held(shared)
        self._check_fresh(fresh_pages)
        for page in shared:
            self._refs[page] += 1
        table = [*shared, *self._take(fresh_pages)]
        self._rows[owner] = table
        return tuple(table)

    def grow(self, owner: Hashable, fresh_pages: int) -> tuple[int, ...]:
        """Append fresh pages to the owner's table and return them alone. Raises like `claim`."""
        if owner not in self._rows:
            raise OwnerConflict(f"owner {owner!r} holds no pages to grow; claim first")
        self._check_fresh(fresh_pages)
        taken = self._take(fresh_pages)
        self._rows[owner].extend(taken)
        return tuple(taken)

    def trim(self, owner: Hashable, pages: int) -> None:
        """Keep the first `pages` of the owner's table and let go of the rest."""
        table = self._rows.get(owner, [])
        self._let_go(table[pages:])
        del table[pages:]

    def release(self, owner: Hashable) -> None:
        """Close the owner's table. Unknown owners are ignored, so a second release does nothing."""
        self._let_go(self._rows.pop(owner, ()))

    def hold(self, kind: Hold, pages: Sequence[int]) -> int:
        """Keep pages that are in use from being freed until `drop` of the returned number. Raises PagesImpossible."""
        self._check_held(pages)
        for page in pages:
            self._refs[page] += 1
        number, self._next_hold = self._next_hold, self._next_hold + 1
        self._holds[number] = (kind, tuple(pages))
        return number

    def drop(self, number: int) -> None:
        """Undo one `hold`. Unknown numbers are ignored, so a second drop does nothing."""
        _, pages = self._holds.pop(number, (None, ()))
        self._let_go(pages)

    def census(self) -> Census:
        """Count every page, O(pages + holders); for idle moments and tests. Never raises: see `Census.is_even`."""
        live = Counter(page for table in self._rows.values() for page in table)
        held = {kind: Counter[int]() for kind in Hold}
        for kind, pages in self._holds.values():
            held[kind].update(pages)
        expected = live + held[Hold.LEASE] + held[Hold.PREFIX] + held[Hold.SNAPSHOT]
        leased = held[Hold.LEASE].keys()
        busy = leased | live.keys()
        cached = busy | held[Hold.PREFIX].keys()
        return Census(
            leased_pages=len(leased),
            live_pages=len(busy) - len(leased),
            prefix_only_pages=len(cached) - len(busy),
            snapshotting_pages=len(expected) - len(cached),
            free_pages=len(self._free),
            total_pages=self.total_pages,
            miscounted_pages=sum(expected[page] != refs for page, refs in enumerate(self._refs)),
        )

    def _check_fresh(self, fresh_pages: int) -> None:
        if not 0 <= fresh_pages <= self.total_pages:
            raise PagesImpossible(
                f"{fresh_pages} pages asked of a pool of {self.total_pages}: lower max_tokens or give KV more memory"
            )
        if fresh_pages > self.free_pages:
            raise PoolShort(f"{fresh_pages} pages asked, {self.free_pages} of {self.total_pages} free; nothing taken")

    def _check_held(self, pages: Sequence[int]) -> None:
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise PagesImpossible(f"pages {list(pages)} repeat one")
        for page in pages:
            if not 0 <= page < self.total_pages or self._refs[page] == 0:
                raise PagesImpossible(f"page {page} is free or outside 0..{self.total_pages - 1}; it can't be shared")

    def _take(self, fresh_pages: int) -> list[int]:
        """Pop that many pages off the free list; the caller has checked that they are there."""
        taken = [self._free.pop() for _ in range(fresh_pages)]
        for page in taken:
            self._refs[page] = 1
        return taken

    def _let_go(self, pages: Iterable[int]) -> None:
        """Count one holder less on each page, last first, and free those that have none left."""
        for page in reversed(tuple(pages)):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, page
            if self._refs[page] == 0:
                self._free.append(page)
