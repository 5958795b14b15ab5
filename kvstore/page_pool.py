"""One device's pool with its prefix cache: claims that share what is known, and evict only what they are sure to get.

Owns the ledger, the index and their order of calls. Pages that only the index holds count as available: whoever is
live may have them, down to the reserve. Must not know requests, time limits or messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from epicycle.kvstore.errors import PoolShort
from epicycle.kvstore.ledger import Census, Ledger
from epicycle.kvstore.prefix_index import Chain, PrefixIndex


class PagePool:
    """Pages 0..total-1. `reserve_pages` idle prefix pages are never evicted for claims and growth."""

    def __init__(self, total_pages: int, reserve_pages: int = 0) -> None:
        self.ledger = Ledger(total_pages)
        self.index = PrefixIndex(self.ledger)
        self._reserve_pages = reserve_pages
        self._chains: dict[Hashable, Chain] = {}

    @property
    def total_pages(self) -> int:
        return self.ledger.total_pages

    @property
    def free_pages(self) -> int:
        return self.ledger.free_pages

    @property
    def available_pages(self) -> int:
        """Free, or freed as soon as somebody claims them. O(1)."""
        return self.free_pages + max(0, self.index.idle_pages - self._reserve_pages)

    def census(self) -> Census:
        return self.ledger.census()

    def cost(self, pages: int, keys: Sequence[bytes]) -> int:
        """What a claim of `pages` that may hit `keys` takes from `available_pages`, at most. O(log keys)."""
        return pages - self.index.used(keys)

    def claim(self, owner: Hashable, pages: int, keys: Sequence[bytes] = (), most_hits: int = 0) -> tuple[int, ...]:
        """Open a table of `pages`; those of the first known keys, at most `most_hits`, are shared. Returns the table.

        `keys` are the prompt's, to be published later. Raises PoolShort, and has evicted nothing, where there are too
        few pages. The owner must be new.
        """
        assert owner not in self._chains, owner
        hits = self.index.known(keys[:most_hits])
        fresh = pages - hits
        idle_hits = hits - self.index.used(keys[:hits])
        evictable = max(0, self.index.idle_pages - idle_hits - self._reserve_pages)
        if fresh > self.free_pages + evictable:
            raise PoolShort(
                f"{pages} pages asked, {hits} of them known, {self.free_pages} of {self.total_pages} free and "
                f"{evictable} evictable; nothing taken"
            )
        chain = self.index.join(keys, hits)
        self.index.evict(max(0, fresh - self.free_pages))
        table = self.ledger.claim(owner, fresh, [node.page for node in chain.nodes])
        self._chains[owner] = chain
        return table

    def hits_of(self, owner: Hashable) -> int:
        """Pages at the head of the owner's table that the index lists as well."""
        return len(self._chains[owner].nodes)

    def grow(self, owner: Hashable, pages: int) -> tuple[int, ...]:
        """Append fresh pages and return them alone. Raises PoolShort and evicts nothing where they aren't there."""
        if pages > self.available_pages:
            raise PoolShort(f"{pages} pages asked, {self.available_pages} of {self.total_pages} available; none taken")
        self.index.evict(max(0, pages - self.free_pages))
        return self.ledger.grow(owner, pages)

    def publish(self, owner: Hashable) -> None:
        """The owner's full prompt pages hold what their keys say: others may share them from now on."""
        self.index.publish(self._chains[owner], self.ledger.pages_of(owner))

    def release(self, owner: Hashable, *, has_prompt: bool) -> tuple[bytes, ...]:
        """Close the owner's table. `has_prompt`: its prompt was computed whole. Returns the owner's keys."""
        chain = self._chains.pop(owner)
        self.index.close(chain, self.ledger.pages_of(owner) if has_prompt else ())
        self.ledger.release(owner)
        return tuple(chain.keys)

    def reset(self) -> int:
        """Empty the index; how many pages that freed."""
        before = self.free_pages
        self.index.reset()
        return self.free_pages - before
