"""Who makes way when an executor's pool or slots run out, and who comes back first.

A row's rank is its place in the waiting queue's order: the lowest rank, the youngest among equals, goes first and comes
back last; since ranks age alike and never change, the highest always advances. Rows leave by being saved on the host
(a preempting Evict) and come back as Resumes, before any newcomer of a lower rank. Owns the executor's host pages and
the requests saved there; must not know the queue, links or clocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import structlog

from epicycle.actors.leases import Leases
from epicycle.actors.plan_outbox import PlanOutbox
from epicycle.actors.slot_table import LAST_RANK, Rank, SlotTable
from epicycle.kvstore.reserve import pages_for
from epicycle.kvstore.snapshots import HostCensus, Snapshots
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.plan import Drop, Evict, Resume

PREEMPT = "preempt"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Saved:
    """A request that is away from the device; `tokens` positions of it hold anything."""

    rid: int
    gateway: int
    rank: Rank
    prompt_tokens: int
    max_tokens: int
    tokens: int
    keys: tuple[bytes, ...]
    session: Hashable


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A waiting request that finds no room: its rank, and the pages it would take of those not in use."""

    rank: Rank
    pages: int


@dataclass
class PreemptionCounts:
    """`refusals`: rows that could not be saved, since the host pages were full."""

    preemptions: int = 0
    resumes: int = 0
    refusals: int = 0


class Preemption:
    """For one executor's epoch. `host_pages` 0 saves nobody."""

    def __init__(
        self,
        table: SlotTable,
        leases: Leases,
        plans: PlanOutbox,
        page_tokens: int,
        host_pages: int,
        counts: PreemptionCounts,
    ) -> None:
        self.first_waiting = LAST_RANK  # of newcomers that find no room: saved requests behind it wait too
        self._counts = counts
        self._table = table
        self._leases = leases
        self._plans = plans
        self._page_tokens = page_tokens
        self._snapshots = Snapshots(host_pages)
        self._saved: dict[int, Saved] = {}
        self._withdrawn: dict[int, tuple[str, str]] = {}  # by rid, of rows on their way out: reason, message
        self._leaving: set[int] = set()  # their slots

    def __len__(self) -> int:
        """Requests that are saved."""
        return len(self._saved)

    @property
    def requests(self) -> Iterator[Saved]:
        return iter(tuple(self._saved.values()))

    @property
    def best_rank(self) -> Rank:
        """Newcomers behind it wait."""
        return min((saved.rank for saved in self._saved.values()), default=LAST_RANK)

    @property
    def host_pages(self) -> tuple[int, int]:
        """(free, total)"""
        return self._snapshots.free_pages, self._snapshots.total_pages

    def host_census(self) -> HostCensus:
        return self._snapshots.census()

    # Leaving

    def relieve(self, protected: set[int]) -> bool:
        """The pool is dry: save the row of the lowest rank that the host has room for, but never the highest of all.
        False where nobody can be saved. `protected` slots stay.
        """
        if any(self._plans.is_unsent(slot) for slot in self._table):
            return True  # as soon as the executor has been told of everybody
        victims = self._victims(protected)
        victims = victims[:-1] if len(victims) == len(self._table) else victims
        for slot in victims:
            if self._leases.held_pages(slot) <= self._snapshots.free_pages:
                self._save(slot)
                return True
        if victims:
            self._refuse(victims[0])
        return False

    def make_way(self, newcomer: Newcomer, protected: set[int]) -> bool:
        """Save rows of a lower priority and rank until there is room, or about to be; False where there won't be."""
        if self._leaving:
            return True
        table, leases = self._table, self._leases
        victims = [
            slot
            for slot in self._victims(protected)
            if table.ranks[slot] > newcomer.rank and table.ranks[slot].priority > newcomer.rank.priority
        ]
        short = newcomer.pages - leases.spare_pages
        chosen: list[int] = []
        for slot in victims:
            if short <= 0 and (chosen or table.free_slots):
                break
            chosen.append(slot)
            short -= leases.held_pages(slot) + leases.owed_pages(slot)
        has_room = short <= 0 and bool(chosen or table.free_slots)
        if not has_room or sum(map(leases.held_pages, chosen)) > self._snapshots.free_pages:
            return False
        for slot in chosen:
            self._save(slot)
        return True

    def _victims(self, protected: set[int]) -> list[int]:
        """Slots whose rows the executor has and may be told to save, the lowest rank first."""
        slots = [
            slot
            for slot in self._table
            if slot not in protected and not self._table.is_evicted[slot] and not self._plans.is_unsent(slot)
        ]
        return sorted(slots, key=self._table.ranks.__getitem__, reverse=True)

    def _save(self, slot: int) -> None:
        host_pages = self._snapshots.begin(self._table.rids[slot], self._leases.held_pages(slot))
        self._leases.park(slot)
        self._table.is_evicted[slot] = True
        self._leaving.add(slot)
        self._plans.evict(Evict(slot, self._table.gens[slot], PREEMPT, host_pages=pack(I32, host_pages)))
        self._counts.preemptions += 1

    def _refuse(self, slot: int) -> None:
        self._counts.refusals += 1
        if self._snapshots.total_pages:
            _log.warning(
                "host_pages_full",
                rid=self._table.rids[slot],
                pages=self._leases.held_pages(slot),
                free=self._snapshots.free_pages,
                total=self._snapshots.total_pages,
                knob="engine.host_kv_bytes",
            )

    def is_leaving(self, slot: int) -> bool:
        return slot in self._leaving

    def withdraw_leaving(self, slot: int, reason: str, message: str) -> None:
        """The row ends while it is being saved: as a row where the executor hears it in time, else once it is saved."""
        self._withdrawn[self._table.rids[slot]] = reason, message
        self._plans.evict(Evict(slot, self._table.gens[slot], reason, message))

    def saved(self, slot: int, tokens: int) -> tuple[str, str] | None:
        """The executor has saved the row of `slot`, which is free now but for the table: (reason, message) where it was
        withdrawn meanwhile and is dropped."""
        table = self._table
        rid = table.rids[slot]
        keys, session = self._leases.leave(slot)
        self._leaving.discard(slot)
        self._snapshots.complete(rid, pages_for(tokens, self._page_tokens))
        self._saved[rid] = Saved(
            rid=rid,
            gateway=table.gateways[slot],
            rank=table.ranks[slot],
            prompt_tokens=table.prompt_tokens[slot],
            max_tokens=table.max_tokens[slot],
            tokens=tokens,
            keys=keys,
            session=session,
        )
        withdrawn = self._withdrawn.pop(rid, None)
        if withdrawn is not None:
            self.drop(rid, *withdrawn)
        return withdrawn

    def forget(self, slot: int, rid: int) -> None:
        """The row has ended and its slot is free, whatever it was on the way to."""
        self._leaving.discard(slot)
        self._withdrawn.pop(rid, None)
        self._snapshots.drop(rid)

    def drop(self, rid: int, reason: str, message: str) -> bool:
        """End a saved request; False where it isn't saved."""
        if self._saved.pop(rid, None) is None:
            return False
        self._snapshots.drop(rid)
        self._plans.drop(Drop(rid, reason, message))
        return True

    # Coming back

    def resume(self) -> None:
        """Bring back whom there is room for, the highest rank first.

        A step of growth beyond its own stays free, so that it doesn't leave again at once.
        """
        for saved in sorted(self._saved.values(), key=lambda saved: saved.rank):
            is_next = saved.rank < self.first_waiting
            if not is_next or not self._table.free_slots or not self._may_resume(saved):
                break
            self._bring_back(saved)

    def _may_resume(self, saved: Saved) -> bool:
        return self._leases.may_resume(saved.keys, saved.tokens, saved.prompt_tokens, saved.max_tokens)

    def _bring_back(self, saved: Saved) -> None:
        del self._saved[saved.rid]
        slot = self._table.take(
            saved.rid, saved.gateway, saved.prompt_tokens, saved.max_tokens, saved.rank, tokens=saved.tokens
        )
        lease = self._leases.reopen(slot, saved.keys, saved.session)
        attached = lease.prefix_tokens // self._page_tokens
        host_pages = self._snapshots.pages_of(saved.rid)[attached:]
        self._snapshots.drop(saved.rid)
        self._plans.resume(
            Resume(
                rid=saved.rid,
                slot=slot,
                gen=self._table.gens[slot],
                pages=lease.pages,
                limit_tokens=lease.limit_tokens,
                attached_pages=attached,
                host_pages=pack(I32, host_pages),
            )
        )
        self._counts.resumes += 1
