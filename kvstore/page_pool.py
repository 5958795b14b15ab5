"""One device's pool with its prefix cache: claims that share what is known, and evict only what they are sure to get.

Owns the ledger, the index and their order of calls. Pages that only the index holds count as available: whoever is
live may have them, down to the reserve. Must not know requests, time limits or messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from epicycle.kvstore.errors import PoolShort
from epicycle.kvstore.ledger import Census, Hold, Ledger
from epicycle.kvstore.prefix_index import Chain, PrefixIndex


class PagePool:
    """Pages 0..total-1. `reserve_pages` idle prefix pages are never evicted for claims and growth."""

    def __init__(self, total_pages: int, reserve_pages: int = 0) -> None:
        self.ledger = Ledger(total_pages)
        self.index = PrefixIndex(self.ledger)
        self._reserve_pages = reserve_pages
        self._evicted: list[tuple[bytes, int]] = []
        self._chains: dict[Hashable, Chain] = {}
        self._parked: dict[Hashable, tuple[int, tuple[int, ...]]] = {}  # hold and table of rows being copied out

    @property
    def total_pages(self) -> int:
        return self.ledger.total_pages

    @property
    def free_pages(self) -> int:
        return self.ledger.free_pages

    @property
    def available_pages(self) -> int:
        """Free, or freed as soon as somebody claims them. O(1)."""
        return self._available_beside(())

    @property
    def obtainable_pages(self) -> int:
        """What is there for an urgent claim: every page that no row holds. O(1)."""
        return self._obtainable_beside(())

    def census(self) -> Census:
        return self.ledger.census()

    def claim(
        self,
        owner: Hashable,
        pages: int,
        keys: Sequence[bytes] = (),
        most_hits: int = 0,
        *,
        is_urgent: bool = False,
    ) -> tuple[int, ...]:
        """Open a table of `pages`; those of the first known keys, at most `most_hits`, are shared. Returns the table.

        `keys` are the prompt's, to be published later. An urgent claim may break pins and the reserve. Raises
        PoolShort, and has evicted nothing, where there are too few pages. The owner must be new. O(pages).
        """
        assert owner not in self._chains, owner
        hits = self.index.known(keys[:most_hits])
        fresh, hit_keys = pages - hits, keys[:hits]
        self._require(fresh, self._obtainable_beside(hit_keys) if is_urgent else self._available_beside(hit_keys))
        chain = self.index.join(keys, hits)
        self._make_free(fresh)
        table = self.ledger.claim(owner, fresh, [node.page for node in chain.nodes])
        self._chains[owner] = chain
        return table

    def hits_of(self, owner: Hashable) -> int:
        """Pages at the head of the owner's table that the index lists as well."""
        return len(self._chains[owner].nodes)

    def grow(self, owner: Hashable, pages: int, *, is_urgent: bool = False) -> tuple[int, ...]:
        """Append fresh pages and return them alone. Raises like `claim`."""
        self._require(pages, self.obtainable_pages if is_urgent else self.available_pages)
        self._make_free(pages)
        return self.ledger.grow(owner, pages)

    def _available_beside(self, hit_keys: Sequence[bytes]) -> int:
        """Pages there for a claim that shares those of `hit_keys`, all known: they can't be evicted for it."""
        idle_hits = len(hit_keys) - self.index.in_use(hit_keys)
        return self.free_pages + max(0, self.index.idle_pages - idle_hits - self._reserve_pages)

    def _obtainable_beside(self, hit_keys: Sequence[bytes]) -> int:
        return self.free_pages + self.index.unreferenced_pages - len(hit_keys) + self.index.in_rows(hit_keys)

    def _require(self, pages: int, there: int) -> None:
        if pages > there:
            raise PoolShort(f"{pages} pages asked, {there} of {self.total_pages} free or evictable; nothing taken")

    def _make_free(self, pages: int) -> None:
        short = max(0, pages - self.free_pages)
        self.index.unpin_until_idle(short)
        self._evicted += self.index.evict(short)

    def take_evicted(self) -> list[tuple[bytes, int]]:
        """(key, page) of cached pages given up since the last call; whoever has the page now hasn't written it yet."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def publish(self, owner: Hashable) -> None:
        """The owner's full prompt pages hold what their keys say: others may share them from now on."""
        if owner not in self._parked:  # else it is listed when it leaves
            self.index.publish(self._chains[owner], self.ledger.pages_of(owner))

    def park(self, owner: Hashable) -> None:
        """The owner's pages are being copied out: they stay as they are, counted as snapshotting, until `release`."""
        table = self.ledger.pages_of(owner)
        self._parked[owner] = self.ledger.hold(Hold.SNAPSHOT, table), table
        self.ledger.release(owner)

    def release(self, owner: Hashable, *, has_prompt: bool) -> tuple[bytes, ...]:
        """Close the owner's table. `has_prompt`: its prompt was computed whole. Returns the owner's keys."""
        chain = self._chains.pop(owner)
        hold, table = self._parked.pop(owner, (None, self.ledger.pages_of(owner)))
        self.index.close(chain, table if has_prompt else ())
        if hold is None:
            self.ledger.release(owner)
        else:
            self.ledger.drop(hold)
        return tuple(chain.keys)

    def reset(self) -> int:
        """Empty the index; how many pages that freed."""
        before = self.free_pages
        self.index.reset()
        return self.free_pages - before
