"""The scheduler: hands each word to the executors it is about, and tells admission and the kv actor what follows.

Owns the units, one per executor that is up, found by the executor's epoch (no two executors ever share one), and the
transfers between them. It never waits: a report is answered by what can be said now. It must not know the queue, nor
prompts beyond passing them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from epicycle.actors import refusals
from epicycle.actors.control_messages import (
    Admit,
    Again,
    ExecutorDown,
    ExecutorUp,
    GatewayLost,
    Left,
    Pressed,
    ToAdmission,
    ToKv,
    ToScheduler,
    Withdraw,
    WithdrawAll,
)
from epicycle.actors.inbox import Inbox
from epicycle.actors.preemption import Newcomer
from epicycle.actors.transfers import Transfer, Transfers
from epicycle.actors.unit import Unit, UnitTotals, Ways
from epicycle.transport.config import Config
from epicycle.transport.link import Sender
from epicycle.transport.wire.plan import StepReport
from epicycle.transport.wire.request import CacheReset, ResetCache, Verdict
from epicycle.transport.wire.transfer import Export, Import

PREFILL = "prefill"

_log = structlog.get_logger()


class Scheduler:
    """One inbox (`inbox`), turned by `turn`. `connect` opens the plan link of the executor named."""

    def __init__(
        self,
        config: Config,
        control_epoch: int,
        clock: Callable[[], float],
        to_admission: Inbox[ToAdmission],
        to_kv: Inbox[ToKv],
        answer: Callable[[int, Verdict], None],
        connect: Callable[[str], Sender],
    ) -> None:
        self.inbox: Inbox[ToScheduler] = Inbox("scheduler")
        self.progress = 0
        self.strangers = 0  # reports of executors that are gone
        self.totals: dict[str, UnitTotals] = {}  # by name, of every executor there ever was
        self.transfers = Transfers(control_epoch)
        self._config = config
        self._control_epoch = control_epoch
        self._clock = clock
        self._ways = Ways(answer, self._left, self._prompt_left, self._activated, to_admission, to_kv)
        self._connect = connect
        self._units: dict[int, Unit] = {}

    @property
    def units(self) -> Iterable[Unit]:
        """The executors that are up; read-only for callers."""
        return self._units.values()

    @property
    def running(self) -> int:
        """Requests in slots, and those that are saved."""
        return sum(unit.running + len(unit.preemption) for unit in self.units)

    @property
    def has_pending(self) -> bool:
        """Some executor has not been told everything yet."""
        return any(unit.plans.has_pending for unit in self.units)

    @property
    def stale_messages(self) -> int:
        return self.strangers + sum(totals.stale_messages for totals in self.totals.values())

    def unit(self, epoch: int) -> Unit:
        """Read-only, for admission: the executor of `epoch`, which is up."""
        return self._units[epoch]

    def turn(self) -> None:
        """Handle what has come and say what is free. `flush` tells the executors, once every actor has been turned."""
        for message in self.inbox.take():
            self._handle(message)
        for unit in self.units:
            unit.turn(self._clock())

    def flush(self) -> None:
        for unit in self.units:
            unit.flush()

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case StepReport():
                self._report(message)
            case Admit():
                self._admit(message)
            case Pressed():
                self._make_way(message)
            case Withdraw(rid=rid, reason=reason, message=text):
                self._withdraw(rid, reason, text)
            case WithdrawAll(reason=reason, message=text):
                self._withdraw_where(lambda gateway: True, reason, text)
            case GatewayLost(number=number):
                self._withdraw_where(lambda gateway: gateway == number, "cancelled", "its gateway is gone")
            case ResetCache(ref=ref, gateway=gateway):
                freed_pages = sum(unit.leases.reset_cache() for unit in self.units)
                self._ways.answer(gateway, CacheReset(ref, freed_pages))
            case ExecutorUp():
                self._meet(message)
            case ExecutorDown(epoch=epoch, reason=reason):
                self._drop(epoch, reason)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")

    def _report(self, report: StepReport) -> None:
        unit = self._units.get(report.epoch)
        if unit is None:
            self.strangers += 1
            return
        self.progress += 1
        if unit.report(report, self._clock()):
            for failure in report.failed:
                self._fail(failure.transfer, failure.code, failure.message)

    def _admit(self, admit: Admit) -> None:
        target = self._units[admit.executor_epoch]
        if not admit.source_epoch:
            target.admit(admit)
            return
        source, transfer = self._units[admit.source_epoch], self.transfers.open(admit)
        target.admit(admit, Import(transfer.id, source.name, source.epoch))
        source.compute(admit, Export(transfer.id, target.name, target.epoch))

    def _make_way(self, pressed: Pressed) -> None:
        """On the first executor where that gives the request room."""
        for unit in self.units:
            unit.preemption.first_waiting = pressed.rank
        for unit in self.units if pressed.pages else ():
            if unit.role == PREFILL or pressed.most_tokens > unit.context_tokens:
                continue
            pages = pressed.pages - unit.leases.in_use(pressed.keys[: pressed.most_hits])
            if unit.make_way(Newcomer(pressed.rank, pages)):
                return

    def _withdraw(self, rid: int, reason: str, message: str) -> None:
        self.transfers.withdraw(rid, reason, message)
        for unit in self.units:
            unit.withdraw(rid, reason, message, self._clock())

    def _withdraw_where(self, is_meant: Callable[[int], bool], reason: str, message: str) -> None:
        meant = {rid: None for unit in self.units for rid, gateway in unit.requests if is_meant(gateway)}
        for rid in meant:
            self._withdraw(rid, reason, message)

    def _fail(self, transfer_id: int, code: str, message: str) -> None:
        """A transfer can't be completed: both rows go without a word to the gateway. Where D runs already, P lacks the
        Ack at worst: only its row goes.
        """
        transfer = self.transfers.find(transfer_id)
        if transfer is None:
            return
        if self.transfers.fail(transfer, code):
            _log.warning("transfer_failed", transfer=transfer.id, code=code, message=message)
            self._evict_silently(transfer, transfer.target)
        self._evict_silently(transfer, transfer.source)

    def _evict_silently(self, transfer: Transfer, epoch: int) -> None:
        unit = self._units.get(epoch)
        if unit is not None:
            unit.withdraw(transfer.admit.submit.rid, "cancelled", "", self._clock(), is_silent=True)

    def _activated(self, rid: int) -> None:
        """D runs the row: whatever was said of its transfer, it hasn't failed."""
        transfer = self.transfers.activate(rid)
        if transfer is not None:
            self._units[transfer.target].keep(rid)
            if transfer.withdrawal is not None:
                self._withdraw(rid, *transfer.withdrawal)

    def _left(self, rid: int) -> None:
        """The unit that answers for `rid` has freed its slot. What runs again waits for P's to be free as well."""
        transfer = self.transfers.of(rid)
        if transfer is None or not transfer.is_failed:
            self._ways.to_admission.post(Left(rid))
        if transfer is not None:
            transfer.has_left_target = True
            self._settle(transfer)

    def _prompt_left(self, rid: int) -> None:
        """P has freed the slot of a prompt that it computed for another executor."""
        transfer = self.transfers.of(rid)
        if transfer is not None:
            transfer.has_left_source = True
            self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        is_over = transfer.has_left_source and transfer.has_left_target
        if not is_over or self.transfers.of(transfer.rid) is not transfer:
            return
        if transfer.is_failed:
            self._run_again(transfer)
        else:
            self.transfers.close(transfer.rid)

    def _run_again(self, transfer: Transfer) -> None:
        """Unless it was withdrawn meanwhile."""
        submit = transfer.admit.submit
        self.transfers.close(transfer.rid)
        if transfer.withdrawal is None:
            self._ways.to_admission.post(Again(submit, transfer.admit.arrived_s))
            return
        self._ways.answer(submit.gateway, refusals.withdrawn(transfer.rid, *transfer.withdrawal))
        self._ways.to_admission.post(Left(transfer.rid))

    def _meet(self, up: ExecutorUp) -> None:
        totals = self.totals.setdefault(up.name, UnitTotals())
        self._units[up.epoch] = Unit(up, self._connect(up.name), self._control_epoch, self._config, self._ways, totals)

    def _drop(self, epoch: int, reason: str) -> None:
        """What it decoded has ended; what it computed for others runs again; what others computed for it goes."""
        unit = self._units.pop(epoch, None)
        if unit is None:
            return
        for transfer in self.transfers.on(epoch):
            if transfer.source == epoch:
                transfer.has_left_source = True
                self._fail(transfer.id, "peer_down", reason)
            else:
                if not transfer.has_left_target:  # `drop` answers for it
                    transfer.has_left_target, transfer.is_failed = True, False
                self._evict_silently(transfer, transfer.source)  # also one that only lacks the Ack
            self._settle(transfer)
        unit.drop(reason)
