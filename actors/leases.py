"""Leases: which pages a slot may write, when it gets more, and who yields when the pool is dry.

Owns the ledger. With lifetime reservation a lease never changes; incremental ones grow at their low-water mark. When
no page is left and none is about to come back, the youngest row is told that its lease is final: it ends with
`length`, and its pages go to the others. So somebody always advances. It must not know links, gateways or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from epicycle.actors.slot_table import SlotTable
from epicycle.kvstore.ledger import Census, Ledger
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


class Leases:
    """Pages of the rows in `table`; each call names a slot that is in use there."""

    def __init__(self, table: SlotTable, rule: ReserveRule, total_pages: int) -> None:
        self._table = table
        self._rule = rule
        self._ledger = Ledger(total_pages)
        self._held = [0] * len(table.rids)
        self._grow_at = [NEVER] * len(table.rids)  # more tokens than this: the lease is low
        self._growing: set[int] = set()  # rows that may ask for more one day
        self._hungry: set[int] = set()  # rows below the mark that wait for pages
        self._ending: set[int] = set()  # rows told to end, whose pages are about to come back

    @property
    def total_pages(self) -> int:
        return self._ledger.total_pages

    @property
    def free_pages(self) -> int:
        return self._ledger.free_pages

    @property
    def spare_pages(self) -> int:
        """Pages a newcomer may claim: one growth step stays back for each row that still grows, none while one waits.

        Without that a newcomer would be admitted only to be the youngest, and cut short.
        """
        if self._hungry:
            return 0
        if self._rule.grow_tokens is None:
            return self.free_pages
        return max(0, self.free_pages - len(self._growing) * pages_for(self._rule.grow_tokens, self._rule.page_tokens))

    def census(self) -> Census:
        return self._ledger.census()

    def open(self, slot: int, pages: int) -> tuple[bytes, int]:
        """Claim a new row's pages; the page table (I32) and the positions it covers. The pages are known to be free."""
        table = self._ledger.claim(slot, pages)
        self._held[slot] = pages
        self._watch(slot)
        return pack(I32, table), pages * self._rule.page_tokens

    def note(self, slots: Iterable[int]) -> None:
        """These rows have moved: the low ones get pages in the next `serve` that has some."""
        if not self._growing:
            return
        held, grow_at = self._table.tokens, self._grow_at
        for slot in slots:
            if 0 <= slot < len(grow_at) and held[slot] > grow_at[slot] and slot not in self._ending:
                self._hungry.add(slot)

    def end(self, slot: int) -> None:
        """The row is on its way out: no growth for it, and others may wait for its pages."""
        self._ending.add(slot)
        self._hungry.discard(slot)

    def close(self, slot: int) -> None:
        """The executor is done with the row: its pages are free."""
        self._ledger.release(slot)
        self._grow_at[slot] = NEVER
        for rows in (self._growing, self._hungry, self._ending):
            rows.discard(slot)

    def serve(self) -> list[Grow]:
        """Growth for rows that wait for it, oldest first; at most one row a call is told to yield."""
        grows: list[Grow] = []
        for slot in sorted(self._hungry, key=self._table.arrivals.__getitem__):
            if self.free_pages == 0:
                break
            grows.append(self._grow(slot))
        if self._hungry and self.free_pages == 0 and not self._ending:
            grows.append(self._yield_youngest())
        return grows

    def _grow(self, slot: int) -> Grow:
        """Up to a whole step; what is there when that is less, and the row stays hungry if it is still low."""
        table = self._table
        wanted = self._rule.growth_pages(
            table.tokens[slot], self._held[slot], table.prompt_tokens[slot], self._outputs(slot)
        )
        pages = self._ledger.grow(slot, min(wanted, self.free_pages))
        self._held[slot] += len(pages)
        self._watch(slot)
        if table.tokens[slot] <= self._grow_at[slot]:
            self._hungry.discard(slot)
        return Grow(slot, table.gens[slot], pack(I32, pages), self._held[slot] * self._rule.page_tokens)

    def _yield_youngest(self) -> Grow:
        """The row that joined last ends. When others wait its lease stops where it is, so that they need not starve."""
        table = self._table
        slot = max((slot for slot in table if slot not in self._ending), key=table.arrivals.__getitem__)
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
