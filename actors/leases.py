"""Leases: which pages a slot may write, which it shares, when it gets more, and who yields when the pool is dry.

Owns the page pool with its prefix cache. With lifetime reservation a lease never changes; incremental ones grow at
their low-water mark. When no page is left and none is about to come back the leases are dry: somebody has to leave the
device, or, where nobody can, the row of the lowest rank is told that its lease is final: it ends with `length`, and its
pages go to the others. So somebody always advances. It must not know links, gateways, clocks, or who leaves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from epicycle.actors.slot_table import SlotTable
from epicycle.kvstore.head_index import HeadIndex
from epicycle.kvstore.host_tier import HostTier
from epicycle.kvstore.ledger import Census
from epicycle.kvstore.page_pool import PagePool
from epicycle.kvstore.reserve import ReserveRule, pages_for
from epicycle.transport.config import SchedulerConfig
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.plan import Grow

NEVER = 1 << 62


def reserve_rule(config: SchedulerConfig, facts: Capabilities) -> ReserveRule:
    """The configured rule; the low-water mark is never below what the executor runs ahead."""
    return ReserveRule(
        page_tokens=facts.page_tokens,
        grow_tokens=config.grow_tokens if config.reservation == "incremental" else None,
        low_water_tokens=max(config.low_water_tokens, facts.run_ahead_ticks + 1),
    )


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Idle prefix pages that live rows may not take; how long and how many pages sessions may pin."""

    reserve_pages: int = 0
    pin_s: float = 0.0
    pin_pages: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A new row's page table (I32), the positions it covers, how many of them hold cached KV already, and head rows."""

    pages: bytes
    limit_tokens: int
    prefix_tokens: int
    head_from: int = -1  # as in Join, and so is the next one
    head_to: int = -1
    host_pages: bytes = b""


class Leases:
    """Pages of the rows in `table`; each call names a slot that is in use there."""

    def __init__(
        self,
        table: SlotTable,
        rule: ReserveRule,
        total_pages: int,
        limits: CacheLimits = CacheLimits(),
        kept_heads: int = 0,
        tier: HostTier | None = None,
    ) -> None:
        self._table = table
        self._rule = rule
        self._limits = limits
        self._pool = PagePool(total_pages, limits.reserve_pages)
        self._heads = HeadIndex(len(table.rids), kept_heads)  # the rows behind those of the slots
        self._tier = tier if tier is not None else HostTier(0, 0, 0)
        self._loading: dict[int, Sequence[bytes]] = {}  # by slot: keys whose host pages its row is copied from
        self._spills: list[tuple[int, int]] = []  # (page, host page)
        self._keeping: dict[int, bytes] = {}  # by slot: the key whose head row its prompt writes
        self._sessions: dict[int, Hashable] = {}  # by slot
        self._held = [0] * len(table.rids)
        self._grow_at = [NEVER] * len(table.rids)  # more tokens than this: the lease is low
        self._growing: set[int] = set()  # rows that may ask for more one day
        self._hungry: set[int] = set()  # rows below the mark that wait for pages
        self._ending: set[int] = set()  # rows told to end, whose pages are about to come back

    @property
    def total_pages(self) -> int:
        return self._pool.total_pages

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    @property
    def prefix_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._pool.index.unreferenced_pages

    @property
    def pinned_pages(self) -> int:
        return self._pool.index.pinned_pages

    @property
    def evicted_pages(self) -> int:
        """Cached pages given up to make room, so far."""
        return self._pool.index.evicted_pages

    @property
    def spare_pages(self) -> int:
        """Pages a newcomer may claim, cached ones that nobody uses among them.

        One growth step stays back for each row that still grows, none while one waits. Without that a newcomer would be
        admitted only to be the youngest, and cut short. To the first row everything is there, pinned pages included: it
        might wait for ever otherwise.
        """
        if not self._table:
            return self._pool.obtainable_pages
        if self._hungry:
            return 0
        if self._rule.grow_tokens is None:
            return self._pool.available_pages
        return max(0, self._pool.available_pages - len(self._growing) * self._step_pages)

    def census(self) -> Census:
        return self._pool.census()

    def in_use(self, keys: Sequence[bytes]) -> int:
        """How many leading keys name cached pages that aren't counted in `spare_pages`: sharing them is free."""
        return self._pool.index.in_use(keys) if self._table else 0

    def known(self, keys: Sequence[bytes]) -> int:
        """How many leading keys name cached pages."""
        return self._pool.index.known(keys)

    def holds_session(self, session: Hashable) -> bool:
        """Whether this pool keeps the session's last prompt."""
        return self._pool.index.has_pin(session)

    def open(
        self,
        slot: int,
        pages: int,
        keys: Sequence[bytes] = (),
        most_hits: int = 0,
        session: Hashable = None,
        *,
        may_keep_head: bool = False,
        may_load: bool = False,
    ) -> Lease:
        """Claim a new row's pages, which are known to be there; cached ones of `keys[:most_hits]` are shared.

        `may_keep_head`: the prompt is whole pages. Where its head row is kept nothing of it is computed. `may_load`:
        pages behind the cached ones may come from the host.
        """
        head_from, head_to = self._head_rows(slot, keys) if may_keep_head and keys else (-1, -1)
        if head_from >= 0:
            most_hits = len(keys)  # no page of the prompt is written again
        on_host = self._lock_on_host(slot, keys[:most_hits]) if may_load else []
        table = self._pool.claim(slot, pages, keys, most_hits, is_urgent=True)
        self._spill()
        self._held[slot] = pages
        if session is not None:
            self._sessions[slot] = session
        self._watch(slot)
        page_tokens = self._rule.page_tokens
        prefix_tokens = (self._pool.hits_of(slot) + len(on_host)) * page_tokens
        return Lease(
            pack(I32, table), pages * page_tokens, prefix_tokens, head_from, head_to, host_pages=pack(I32, on_host)
        )

    def _lock_on_host(self, slot: int, keys: Sequence[bytes]) -> list[int]:
        """Host pages of the keys that follow those the pool has; they stay until the row has its prompt."""
        behind = keys[self.known(keys) :]
        found = behind[: self._tier.hits(behind)]
        if found:
            self._loading[slot] = found
        return self._tier.lock(found)

    def _unlock_on_host(self, slot: int) -> None:
        self._tier.unlock(self._loading.pop(slot, ()))

    def _spill(self) -> None:
        """Cached pages that were just given up go to the host, as far as there is room."""
        for key, page in self._pool.take_evicted():
            host_page = self._tier.spill(key)
            if host_page is not None:
                self._spills.append((page, host_page))

    def take_spills(self) -> list[tuple[int, int]]:
        """(page, host page) to copy before anybody writes what was claimed since the last call."""
        spills, self._spills = self._spills, []
        return spills

    def spills_arrived(self, pages: int) -> None:
        """So many spilled pages have arrived on the host, of all there ever were."""
        self._tier.arrived(pages)

    @property
    def spilled_pages(self) -> int:
        return self._tier.spilled_pages

    @property
    def host_prefix_pages(self) -> int:
        """Cached pages on the host."""
        return len(self._tier)

    def _head_rows(self, slot: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """(row to start from, row to write), -1 for none."""
        found = self._heads.find(keys[-1]) if self.known(keys) == len(keys) else None
        if found is not None:
            return found, -1
        row = self._heads.keep(keys[-1])
        if row is None:
            return -1, -1
        self._keeping[slot] = keys[-1]
        return -1, row

    def _settle_head(self, slot: int, *, is_written: bool) -> None:
        key = self._keeping.pop(slot, None)
        if key is not None:
            self._heads.settle(key, is_written=is_written)

    def publish(self, slots: Iterable[int]) -> None:
        """The prompts of these rows are written: others may share their full pages."""
        for slot in slots:
            self._pool.publish(slot)
            self._settle_head(slot, is_written=True)
            self._unlock_on_host(slot)

    def expire(self, now_s: float) -> None:
        """Let go of sessions whose time is over."""
        self._pool.index.expire(now_s)

    def reset_cache(self) -> int:
        """Forget every prefix; how many pages that freed."""
        self._heads.reset()
        self._tier.reset()
        return self._pool.reset()

    def note(self, slots: Iterable[int]) -> None:
        """These rows have moved: the low ones get pages in the next `serve` that has some."""
        if not self._growing:
            return
        held, grow_at = self._table.tokens, self._grow_at
        for slot in slots:
            if 0 <= slot < len(grow_at) and held[slot] > grow_at[slot] and slot not in self._ending:
                self._hungry.add(slot)

    def held_pages(self, slot: int) -> int:
        """Pages in the row's table, shared ones too."""
        return self._held[slot]

    def owed_pages(self, slot: int) -> int:
        """Pages that stay back for the row's growth."""
        return self._step_pages if slot in self._growing else 0

    @property
    def _step_pages(self) -> int:
        return pages_for(self._rule.grow_tokens, self._rule.page_tokens) if self._rule.grow_tokens is not None else 0

    def park(self, slot: int) -> None:
        """The row is on its way out: its pages stay as they are until `leave`."""
        self.end(slot)
        self._pool.park(slot)

    def leave(self, slot: int) -> tuple[tuple[bytes, ...], Hashable]:
        """The row has been saved: its pages are free, or cached. Its prompt's keys and its session go with it."""
        session = self._sessions.pop(slot, None)
        keys = self._pool.release(slot, has_prompt=self._table.has_prompt(slot))
        self._forget(slot)
        return keys, session

    def may_resume(self, keys: Sequence[bytes], tokens: int, prompt_tokens: int, max_tokens: int) -> bool:
        """There is room for a saved row, and for a step of growth more where it has company."""
        if not self._table:
            return True
        pages = self._rule.pages_to_go_on(tokens, prompt_tokens, max(1, max_tokens))
        cost_pages = pages - self.in_use(keys[: tokens // self._rule.page_tokens])
        return cost_pages + self._step_pages <= self.spare_pages

    def reopen(self, slot: int, keys: Sequence[bytes], session: Hashable) -> Lease:
        """Claim the pages of a row that comes back, `table.tokens` positions of which were written."""
        table = self._table
        tokens = table.tokens[slot]
        pages = self._rule.pages_to_go_on(tokens, table.prompt_tokens[slot], self._outputs(slot))
        return self.open(slot, pages, keys, tokens // self._rule.page_tokens, session)

    def end(self, slot: int) -> None:
        """The row is on its way out: no growth for it, and others may wait for its pages."""
        self._ending.add(slot)
        self._hungry.discard(slot)

    def keep(self, slot: int) -> None:
        """It is not, after all."""
        self._ending.discard(slot)

    def close(self, slot: int, now_s: float = 0.0) -> None:
        """The executor is done with the row: its pages are free, or cached, and pinned for a while for a session."""
        keys = self._pool.release(slot, has_prompt=self._table.has_prompt(slot))
        session = self._sessions.pop(slot, None)
        if session is not None:
            self._pool.index.pin(session, keys, now_s + self._limits.pin_s, self._limits.pin_pages)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._settle_head(slot, is_written=False)
        self._unlock_on_host(slot)
        self._grow_at[slot] = NEVER
        for rows in (self._growing, self._hungry, self._ending):
            rows.discard(slot)

    @property
    def _growth_pages(self) -> int:
        """Pages there for rows that grow; the only row gets pinned ones too, rather than end."""
        return self._pool.obtainable_pages if len(self._table) == 1 else self._pool.available_pages

    def serve(self) -> list[Grow]:
        """Growth for rows that wait for it, the highest rank first, as long as there are pages."""
        grows: list[Grow] = []
        for slot in sorted(self._hungry, key=self._table.ranks.__getitem__):
            if self._growth_pages == 0:
                break
            grows.append(self._grow(slot))
        return grows

    @property
    def is_dry(self) -> bool:
        """A row waits for pages, there are none, and none are about to come back."""
        return bool(self._hungry) and self._growth_pages == 0 and not self._ending

    def _grow(self, slot: int) -> Grow:
        """Up to a whole step; what is there when that is less, and the row stays hungry if it is still low."""
        table = self._table
        wanted = self._rule.growth_pages(
            table.tokens[slot], self._held[slot], table.prompt_tokens[slot], self._outputs(slot)
        )
        pages = self._pool.grow(slot, min(wanted, self._growth_pages), is_urgent=True)
        self._spill()
        self._held[slot] += len(pages)
        self._watch(slot)
        if table.tokens[slot] <= self._grow_at[slot]:
            self._hungry.discard(slot)
        return Grow(slot, table.gens[slot], pack(I32, pages), self._held[slot] * self._rule.page_tokens)

    def yield_lowest(self) -> Grow:
        """The row of the lowest rank ends. Where others wait its lease stops where it is: they need not starve then."""
        table = self._table
        slot = max((slot for slot in table if slot not in self._ending), key=table.ranks.__getitem__)
        others_wait = bool(self._hungry - {slot})
        limit_tokens = self._held[slot] * self._rule.page_tokens
        if others_wait:
            limit_tokens = min(limit_tokens, max(table.prompt_tokens[slot], table.tokens[slot]))
        self.end(slot)
        return Grow(slot, table.gens[slot], b"", limit_tokens, is_final=True)

    def _watch(self, slot: int) -> None:
        """Set the token count past which the row is low."""
        table, rule = self._table, self._rule
        if rule.is_low(NEVER, self._held[slot], table.prompt_tokens[slot], self._outputs(slot)):
            self._growing.add(slot)
            self._grow_at[slot] = self._held[slot] * rule.page_tokens - rule.low_water_tokens
        else:
            self._growing.discard(slot)
            self._grow_at[slot] = NEVER

    def _outputs(self, slot: int) -> int:
        """max_tokens 0 scores the prompt only and writes what one output would."""
        return max(1, self._table.max_tokens[slot])
