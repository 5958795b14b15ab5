"""One executor as the scheduler sees it, from its Ready to its end: slots, leases, and the plans on their way to it.

Owns everything that belongs to one epoch; the next epoch starts with a new unit, and only `totals` go on. Slots and
pages are given out again only after the executor has reported them freed. It must not know the queue, other executors,
or which loop a row is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from epicycle.actors import refusals
from epicycle.actors.control_messages import (
    Admit,
    ExecutorUp,
    Left,
    PoolIdle,
    Published,
    Room,
    ToAdmission,
    ToKv,
)
from epicycle.actors.inbox import Inbox
from epicycle.actors.leases import CacheLimits, Lease, Leases, reserve_rule
from epicycle.actors.plan_outbox import PlanOutbox
from epicycle.actors.preemption import Newcomer, Preemption, PreemptionCounts
from epicycle.actors.prefix_policy import prefix_policy
from epicycle.actors.slot_table import SlotTable
from epicycle.actors.step_reports import ReportTotals
from epicycle.kvstore.host_tier import HostTier
from epicycle.kvstore.ledger import Census
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.config import Config
from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import I32, unpack
from epicycle.transport.wire.plan import Drop, Evict, Join, StepReport
from epicycle.transport.wire.request import Accepted, Verdict
from epicycle.transport.wire.transfer import Export, Import

_log = structlog.get_logger()


@dataclass
class UnitTotals:
    """Counts of one executor over all its epochs. Metrics must not fall."""

    reports: ReportTotals = field(default_factory=ReportTotals)
    yielded_rows: int = 0
    preemption: PreemptionCounts = field(default_factory=PreemptionCounts)
    host_hit_tokens: int = 0  # of those, the ones whose KV comes back from the host
    evicted_pages: int = 0  # of earlier epochs, and so is the next one
    spilled_pages: int = 0
    prefix_query_tokens: int = 0  # prompt tokens of joins that could have found a prefix
    prefix_hit_tokens: int = 0  # of those, the ones that are not computed
    stale_messages: int = 0


@dataclass(frozen=True, slots=True)
class Ways:
    """Where a unit's words go: verdicts by gateway number, and its neighbours' inboxes. `left(rid)`: a request that
    this unit was to answer holds nothing here any more; `prompt_left(rid)`: nor does a prompt for another executor;
    `activated(rid)`: the prompt of one to answer is written here.
    """

    answer: Callable[[int, Verdict], None]
    left: Callable[[int], None]
    prompt_left: Callable[[int], None]
    activated: Callable[[int], None]
    to_admission: Inbox[ToAdmission]
    to_kv: Inbox[ToKv]


class Unit:
    """`name` at one epoch. `sender` is the plan link; `close` it by `drop`."""

    def __init__(
        self, up: ExecutorUp, sender: Sender, control_epoch: int, config: Config, ways: Ways, totals: UnitTotals
    ) -> None:
        self.name = up.name
        self.epoch = up.epoch
        self.role = up.role
        self.context_tokens = up.facts.context_tokens
        self.plan_terms = up.facts.plan_terms
        self.totals = totals
        self.table = SlotTable(up.facts.slots)
        self.prefix = prefix_policy(config, up.facts)
        limits = CacheLimits(self.prefix.reserve_pages, self.prefix.pin_s, self.prefix.pin_pages)
        rule = reserve_rule(config.scheduler, up.facts)
        tier = HostTier(up.facts.host_pages, up.facts.host_prefix_pages, up.facts.most_spills)
        self.leases = Leases(self.table, rule, up.facts.total_pages, limits, up.facts.kept_heads, tier)
        self.plans = PlanOutbox(sender, up.epoch, control_epoch)
        host_pages = up.facts.host_pages if config.scheduler.preemption else 0
        self.preemption = Preemption(
            self.table, self.leases, self.plans, up.facts.page_tokens, host_pages, totals.preemption
        )
        self._control_epoch = control_epoch
        self._ways = ways
        self._exporting: set[int] = set()  # slots whose prompts are for another executor, which answers for them
        self._importing: set[int] = set()  # slots whose prompts come from another executor and aren't written yet

    @property
    def running(self) -> int:
        """Slots in use."""
        return len(self.table)

    @property
    def requests(self) -> Iterator[tuple[int, int]]:
        """(rid, gateway) of whoever holds a slot, and then of those that are saved."""
        table = self.table
        yield from [(table.rids[slot], table.gateways[slot]) for slot in table]
        yield from [(saved.rid, saved.gateway) for saved in self.preemption.requests]

    def holds(self, rid: int) -> bool:
        return self.table.slot_of(rid) is not None

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        table = self.table
        return sum(max(0, table.prompt_tokens[slot] - table.tokens[slot]) for slot in table)

    def census(self) -> Census:
        """Read-only count of the pool, for the kv actor."""
        return self.leases.census()

    def turn(self, now_s: float) -> None:
        """Let leases grow, save or end a row where the pool is dry, and say what is free."""
        self.leases.expire(now_s)
        for grow in self.leases.serve():
            self.plans.grow(grow)
        if self.leases.is_dry and not self.preemption.relieve(self._exporting | self._importing):
            self.totals.yielded_rows += 1
            self.plans.grow(self.leases.yield_lowest())
        room = Room(self.epoch, self.table.free_slots, self.leases.spare_pages, self.preemption.best_rank)
        self._ways.to_admission.post(room)

    def make_way(self, newcomer: Newcomer) -> bool:
        """Save rows of lower priorities for a newcomer that finds no room; False where that won't give it room."""
        return self.preemption.make_way(newcomer, self._exporting | self._importing)

    def flush(self) -> None:
        """Bring back saved requests, as admission has seen the room, and offer the pending Plan to the link; requests
        whose Join is on its way are accepted."""
        self.preemption.resume()
        self.plans.spill(self.leases.take_spills())
        for join in self.plans.flush():
            self._count_prefix(join)
            if join.exports is None:
                self._ways.answer(join.gateway, Accepted(join.rid, join.queue_ms, self.epoch))

    def _count_prefix(self, join: Join) -> None:
        if join.imports is None and self.prefix.may_hit(join.sampling.prompt_logprobs):
            prompt_tokens = len(join.prompt) // 4
            self.totals.prefix_query_tokens += prompt_tokens
            computed_at_least = 0 if join.head_from >= 0 else 1
            self.totals.host_hit_tokens += len(join.host_pages) // 4 * self.prefix.page_tokens
            self.totals.prefix_hit_tokens += min(join.prefix_tokens, prompt_tokens - computed_at_least)

    def report(self, report: StepReport, now_s: float) -> bool:
        """Apply a report: rows that moved first, then those that are saved, then slots that are free, as one row may be
        several. False: it is stale."""
        if report.control_epoch != self._control_epoch:
            self.totals.stale_messages += 1
            return False
        self.totals.reports.update(report)
        self.leases.spills_arrived(report.spilled_pages)
        table, leases = self.table, self.leases
        slots = unpack(I32, report.slots)
        saved = [unpack(I32, column) for column in (report.saved_slots, report.saved_gens, report.saved_tokens)]
        self.totals.stale_messages += table.advance(slots, unpack(I32, report.gens), unpack(I32, report.tokens))
        self.totals.stale_messages += table.advance(*saved)
        completed = table.take_completed()
        leases.publish(completed)
        self._importing.difference_update(completed)
        for slot in completed:
            if slot not in self._exporting:
                self._ways.activated(table.rids[slot])
            self._ways.to_admission.post(Published(table.rids[slot]))
        leases.note(slots)
        for slot, gen, tokens in zip(*saved, strict=True):
            if table.is_current(slot, gen):
                self._shelve(slot, tokens)
        for slot, gen in zip(unpack(I32, report.freed_slots), unpack(I32, report.freed_gens), strict=True):
            if table.is_current(slot, gen):
                self._free(slot, now_s)
            else:
                self.totals.stale_messages += 1
        return True

    def admit(self, admit: Admit, imports: Import | None = None) -> None:
        """Give the request a slot and its first lease; admission has seen that both are there."""
        slot = self._take(admit, admit.submit.sampling.max_tokens)
        if imports is not None:
            self._importing.add(slot)
        lease = self.leases.open(
            slot,
            admit.pages,
            admit.keys,
            admit.most_hits,
            self.prefix.session(admit.submit),
            may_keep_head=imports is None and self.prefix.may_keep_head(admit.submit),
            may_load=imports is None,
        )
        self.plans.join(self._join(admit, slot, lease, imports=imports))

    def compute(self, admit: Admit, exports: Export) -> None:
        """Give the request's prompt a slot and its pages, for another executor."""
        slot = self._take(admit, max_tokens=1)
        self._exporting.add(slot)
        pages = pages_for(self.table.prompt_tokens[slot], self.prefix.page_tokens)
        lease = self.leases.open(slot, pages, admit.keys, admit.most_hits)
        self.plans.join(self._join(admit, slot, lease, exports=exports))

    def _take(self, admit: Admit, max_tokens: int) -> int:
        submit = admit.submit
        return self.table.take(submit.rid, submit.gateway, len(submit.prompt) // 4, max_tokens, admit.rank)

    def _join(
        self, admit: Admit, slot: int, lease: Lease, imports: Import | None = None, exports: Export | None = None
    ) -> Join:
        submit = admit.submit
        return Join(
            rid=submit.rid,
            gateway=submit.gateway,
            slot=slot,
            gen=self.table.gens[slot],
            prompt=submit.prompt,
            pages=lease.pages,
            limit_tokens=lease.limit_tokens,
            sampling=submit.sampling,
            loops=submit.loops,
            prefix_tokens=lease.prefix_tokens,
            noise_seed=submit.noise_seed,
            queue_ms=admit.queue_ms,
            imports=imports,
            exports=exports,
            head_from=lease.head_from,
            head_to=lease.head_to,
            host_pages=lease.host_pages,
        )

    def withdraw(self, rid: int, reason: str, message: str, now_s: float, *, is_silent: bool = False) -> None:
        """Evict a row. The executor's Fin is its terminal; one whose Join was never sent gets a Rejected from here.

        Where it `is_silent`, or the row is only a prompt for another executor, there is no terminal.
        """
        if self.preemption.drop(rid, reason, message):
            self._ways.left(rid)
            return
        slot = self.table.slot_of(rid)
        if slot is not None and self.preemption.is_leaving(slot):
            self.preemption.withdraw_leaving(slot, reason, message)
            return
        if slot is None or self.table.is_evicted[slot]:
            return
        if self.plans.take_back(slot) is not None:
            self.plans.drop(Drop(rid, reason, message))
            self._free(slot, now_s)
            return
        is_silent |= slot in self._exporting
        join = self.plans.withdraw(slot)
        if join is None:
            self.leases.end(slot)
            self.table.is_evicted[slot] = True
            self.plans.evict(Evict(slot, self.table.gens[slot], reason, message, is_silent))
            return
        if not is_silent:
            self._ways.answer(join.gateway, refusals.withdrawn(rid, reason, message))
        self._free(slot, now_s)

    def keep(self, rid: int) -> None:
        """The row was to go silently, and stays."""
        slot = self.table.slot_of(rid)
        if slot is not None:
            self.table.is_evicted[slot] = False
            self.leases.keep(slot)

    def drop(self, reason: str) -> None:
        """The executor is gone. A gateway may not know yet that its request had gone to it, so all are told."""
        self.plans.sender.close()
        self.totals.reports.end_epoch()
        self.totals.evicted_pages += self.leases.evicted_pages
        self.totals.spilled_pages += self.leases.spilled_pages
        exported = {self.table.rids[slot] for slot in self._exporting}
        for rid, gateway in self.requests:
            if rid not in exported:
                self._ways.answer(gateway, refusals.engine_lost(rid, reason))
                self._ways.to_admission.post(Left(rid))
        _log.warning("executor_dropped", executor=self.name, epoch=self.epoch, reason=reason, rows=self.running)

    def _shelve(self, slot: int, tokens: int) -> None:
        """The row is saved: slot and pages may be used again. Nobody should wait for a prompt that isn't computed."""
        self.plans.forget(slot)
        has_prompt = self.table.has_prompt(slot)
        withdrawn = self.preemption.saved(slot, tokens)
        rid = self.table.release(slot)
        if withdrawn is not None:
            self._ways.left(rid)
        elif not has_prompt:
            self._ways.to_admission.post(Published(rid))
        self._tell_idle()

    def _free(self, slot: int, now_s: float) -> None:
        """Nothing on the device touches the slot any more: slot and pages may be used again."""
        self.plans.forget(slot)
        self.leases.close(slot, now_s)
        self._importing.discard(slot)
        rid = self.table.release(slot)
        self.preemption.forget(slot, rid)
        if slot in self._exporting:
            self._exporting.discard(slot)
            self._ways.prompt_left(rid)
        else:
            self._ways.left(rid)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if not self.table:
            self._ways.to_kv.post(PoolIdle(self.name))
