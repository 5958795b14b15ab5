"""The scheduler: decides who runs and how much, tells the executor in Plans, and learns what happened from reports.

Owns slots and leases (and through them the ledger). Slots and pages are given out again only after the executor has
reported them freed. It never waits: a report is answered by what can be said now. It must not know the queue, prompts
beyond passing them on, or which loop a row is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from epicycle.actors import refusals
from epicycle.actors.control_messages import (
    Admit,
    ExecutorDown,
    ExecutorUp,
    GatewayLost,
    Left,
    PoolIdle,
    Published,
    Room,
    ToAdmission,
    ToKv,
    ToScheduler,
    Withdraw,
    WithdrawAll,
)
from epicycle.actors.inbox import Inbox
from epicycle.actors.leases import CacheLimits, Leases, reserve_rule
from epicycle.actors.plan_outbox import PlanOutbox
from epicycle.actors.prefix_policy import prefix_policy
from epicycle.actors.slot_table import SlotTable
from epicycle.actors.step_reports import ReportTotals
from epicycle.kvstore.ledger import Census
from epicycle.transport.config import Config
from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import I32, unpack
from epicycle.transport.wire.plan import Evict, Join, StepReport
from epicycle.transport.wire.request import Accepted, CacheReset, ResetCache, Verdict

_log = structlog.get_logger()


class Executor:
    """Everything that belongs to one epoch of the executor; a new epoch starts with a new one."""

    def __init__(self, up: ExecutorUp, sender: Sender, control_epoch: int, config: Config) -> None:
        self.epoch = up.epoch
        self.table = SlotTable(up.facts.slots)
        self.prefix = prefix_policy(config, up.facts)
        limits = CacheLimits(self.prefix.reserve_pages, self.prefix.pin_s, self.prefix.pin_pages)
        self.leases = Leases(self.table, reserve_rule(config.scheduler, up.facts), up.facts.total_pages, limits)
        self.plans = PlanOutbox(sender, up.epoch, control_epoch)


class Scheduler:
    """One inbox (`inbox`), turned by `turn`. `connect` opens the plan link of the executor that is up."""

    def __init__(
        self,
        config: Config,
        control_epoch: int,
        clock: Callable[[], float],
        to_admission: Inbox[ToAdmission],
        to_kv: Inbox[ToKv],
        answer: Callable[[int, Verdict], None],
        connect: Callable[[], Sender],
    ) -> None:
        self.inbox: Inbox[ToScheduler] = Inbox("scheduler")
        self.progress = 0
        self.stale_messages = 0
        self.yielded_rows = 0
        self.prefix_query_tokens = 0  # prompt tokens of joins that could have found a prefix
        self.prefix_hit_tokens = 0  # of those, the ones that are not computed
        self.totals = ReportTotals()
        self._config = config
        self._control_epoch = control_epoch
        self._clock = clock
        self._to_admission = to_admission
        self._to_kv = to_kv
        self._answer = answer
        self._connect = connect
        self._executor: Executor | None = None

    @property
    def running(self) -> int:
        return len(self._executor.table) if self._executor is not None else 0

    @property
    def prefilling(self) -> int:
        return self._executor.table.prefilling if self._executor is not None else 0

    @property
    def pages(self) -> tuple[int, int]:
        """(free, total) pages; (0, 0) without an executor."""
        return (self._executor.leases.free_pages, self._executor.leases.total_pages) if self._executor else (0, 0)

    @property
    def cached_pages(self) -> tuple[int, int]:
        """(pages that only the prefix cache holds, pages pinned by sessions)."""
        leases = self._executor.leases if self._executor is not None else None
        return (leases.prefix_pages, leases.pinned_pages) if leases is not None else (0, 0)

    def known(self, keys: Sequence[bytes]) -> int:
        """Read-only, for admission: how many leading keys name cached pages."""
        return self._executor.leases.known(keys) if self._executor is not None else 0

    def in_use(self, keys: Sequence[bytes]) -> int:
        """Read-only, for admission: how many leading keys name cached pages that cost a newcomer nothing."""
        return self._executor.leases.in_use(keys) if self._executor is not None else 0

    @property
    def has_pending(self) -> bool:
        """The executor has not been told everything yet."""
        return self._executor is not None and self._executor.plans.has_pending

    @property
    def plan_counts(self) -> tuple[int, int]:
        """(sent, merged) of the present executor."""
        return (self._executor.plans.plans, self._executor.plans.merges) if self._executor else (0, 0)

    def census(self) -> Census | None:
        """Read-only count of the pool, for the kv actor; None without an executor."""
        return self._executor.leases.census() if self._executor is not None else None

    def turn(self) -> None:
        """Handle what has come and say what is free. `flush` tells the executor, once every actor has been turned."""
        for message in self.inbox.take():
            self._handle(message)
        executor = self._executor
        if executor is None:
            return
        leases = executor.leases
        leases.expire(self._clock())
        for grow in leases.serve():
            self.yielded_rows += grow.is_final
            executor.plans.grow(grow)
        self._to_admission.post(Room(executor.table.free_slots, leases.spare_pages))

    def flush(self) -> None:
        """Offer the pending Plan to the link; requests whose Join is on its way are accepted."""
        if self._executor is not None:
            for join in self._executor.plans.flush():
                self._count_prefix(self._executor, join)
                self._answer(join.gateway, Accepted(join.rid, join.queue_ms))

    def _count_prefix(self, executor: Executor, join: Join) -> None:
        if executor.prefix.may_hit(join.sampling.prompt_logprobs):
            prompt_tokens = len(join.prompt) // 4
            self.prefix_query_tokens += prompt_tokens
            self.prefix_hit_tokens += min(join.prefix_tokens, prompt_tokens - 1)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case StepReport():
                self._report(message)
            case Admit():
                self._admit(message)
            case Withdraw(rid=rid, reason=reason, message=text):
                self._withdraw(rid, reason, text)
            case WithdrawAll(reason=reason, message=text):
                for rid in self._rids():
                    self._withdraw(rid, reason, text)
            case GatewayLost(number=number):
                self._lose_gateway(number)
            case ResetCache(ref=ref, gateway=gateway):
                freed_pages = self._executor.leases.reset_cache() if self._executor is not None else 0
                self._answer(gateway, CacheReset(ref, freed_pages))
            case ExecutorUp():
                self._drop_executor("another one has taken its place")
                self._executor = Executor(message, self._connect(), self._control_epoch, self._config)
            case ExecutorDown(reason=reason):
                self._drop_executor(reason)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")

    def _rids(self) -> list[int]:
        return [self._executor.table.rids[slot] for slot in self._executor.table] if self._executor else []

    def _report(self, report: StepReport) -> None:
        """Apply a report: rows that moved first, then slots that are free, as one may be both."""
        executor = self._executor
        if executor is None or report.epoch != executor.epoch or report.control_epoch != self._control_epoch:
            self.stale_messages += 1
            return
        self.progress += 1
        self.totals.update(report)
        table, leases = executor.table, executor.leases
        slots = unpack(I32, report.slots)
        self.stale_messages += table.advance(slots, unpack(I32, report.gens), unpack(I32, report.tokens))
        completed = table.take_completed()
        leases.publish(completed)
        for slot in completed:
            self._to_admission.post(Published(table.rids[slot]))
        leases.note(slots)
        for slot, gen in zip(unpack(I32, report.freed_slots), unpack(I32, report.freed_gens), strict=True):
            if table.is_current(slot, gen):
                self._free(executor, slot)
            else:
                self.stale_messages += 1

    def _free(self, executor: Executor, slot: int) -> None:
        """Nothing on the device touches the slot any more: slot and pages may be used again."""
        executor.plans.forget(slot)
        executor.leases.close(slot, self._clock())
        self._to_admission.post(Left(executor.table.release(slot)))
        if not executor.table:
            self._to_kv.post(PoolIdle())

    def _admit(self, admit: Admit) -> None:
        executor, submit = self._executor, admit.submit
        assert executor is not None, "admission has no room without an executor"
        prompt_tokens = len(submit.prompt) // 4
        slot = executor.table.take(submit.rid, submit.gateway, prompt_tokens, submit.sampling.max_tokens)
        session = executor.prefix.session(submit)
        lease = executor.leases.open(slot, admit.pages, admit.keys, admit.most_hits, session)
        join = Join(
            rid=submit.rid,
            gateway=submit.gateway,
            slot=slot,
            gen=executor.table.gens[slot],
            prompt=submit.prompt,
            pages=lease.pages,
            limit_tokens=lease.limit_tokens,
            sampling=submit.sampling,
            loops=submit.loops,
            prefix_tokens=lease.prefix_tokens,
            noise_seed=submit.noise_seed,
            queue_ms=admit.queue_ms,
        )
        executor.plans.join(join)

    def _withdraw(self, rid: int, reason: str, message: str) -> None:
        """Evict a row. The executor's Fin is its terminal; one whose Join was never sent gets a Rejected from here."""
        executor = self._executor
        slot = executor.table.slot_of(rid) if executor is not None else None
        if executor is None or slot is None or executor.table.is_evicted[slot]:
            return
        join = executor.plans.withdraw(slot)
        if join is None:
            executor.leases.end(slot)
            executor.table.is_evicted[slot] = True
            executor.plans.evict(Evict(slot, executor.table.gens[slot], reason, message))
            return
        self._answer(join.gateway, refusals.withdrawn(rid, reason, message))
        self._free(executor, slot)

    def _lose_gateway(self, number: int) -> None:
        if self._executor is None:
            return
        table = self._executor.table
        for slot in table:
            if table.gateways[slot] == number:
                self._withdraw(table.rids[slot], "cancelled", "its gateway is gone")

    def _drop_executor(self, reason: str) -> None:
        """Forget the epoch. A gateway may not know yet that its request had gone to this executor, so all are told."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        executor.plans.sender.close()
        self.totals.end_epoch()
        for slot in executor.table:
            rid = executor.table.rids[slot]
            self._answer(executor.table.gateways[slot], refusals.engine_lost(rid, reason))
            self._to_admission.post(Left(rid))
        _log.warning("executor_dropped", epoch=executor.epoch, reason=reason, rows=len(executor.table))
