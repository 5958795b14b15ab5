"""The scheduler: hands each word to the executor it is about, and tells admission and the kv actor what follows.

Owns the units, one per executor that is up, found by the executor's epoch (no two executors ever share one). It never
waits: a report is answered by what can be said now. It must not know the queue, nor prompts beyond passing them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from epicycle.actors.control_messages import (
    Admit,
    ExecutorDown,
    ExecutorUp,
    GatewayLost,
    ToAdmission,
    ToKv,
    ToScheduler,
    Withdraw,
    WithdrawAll,
)
from epicycle.actors.inbox import Inbox
from epicycle.actors.leases import Leases
from epicycle.actors.unit import Unit, UnitTotals, Ways
from epicycle.transport.config import Config
from epicycle.transport.link import Sender
from epicycle.transport.wire.plan import StepReport
from epicycle.transport.wire.request import CacheReset, ResetCache, Verdict


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
        self._config = config
        self._control_epoch = control_epoch
        self._clock = clock
        self._ways = Ways(answer, to_admission, to_kv)
        self._connect = connect
        self._units: dict[int, Unit] = {}

    @property
    def units(self) -> Iterable[Unit]:
        """The executors that are up; read-only for callers."""
        return self._units.values()

    @property
    def running(self) -> int:
        return sum(unit.running for unit in self.units)

    @property
    def has_pending(self) -> bool:
        """Some executor has not been told everything yet."""
        return any(unit.plans.has_pending for unit in self.units)

    @property
    def stale_messages(self) -> int:
        return self.strangers + sum(totals.stale_messages for totals in self.totals.values())

    def leases(self, epoch: int) -> Leases:
        """Read-only, for admission: what the executor of `epoch`, which is up, has cached."""
        return self._units[epoch].leases

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
            case Admit(executor_epoch=epoch):
                self._units[epoch].admit(message)
            case Withdraw(rid=rid, reason=reason, message=text):
                for unit in self.units:
                    unit.withdraw(rid, reason, text, self._clock())
            case WithdrawAll(reason=reason, message=text):
                for unit in self.units:
                    for rid in unit.rids:
                        unit.withdraw(rid, reason, text, self._clock())
            case GatewayLost(number=number):
                for unit in self.units:
                    unit.lose_gateway(number, self._clock())
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
        unit.report(report, self._clock())

    def _meet(self, up: ExecutorUp) -> None:
        totals = self.totals.setdefault(up.name, UnitTotals())
        self._units[up.epoch] = Unit(up, self._connect(up.name), self._control_epoch, self._config, self._ways, totals)

    def _drop(self, epoch: int, reason: str) -> None:
        unit = self._units.pop(epoch, None)
        if unit is not None:
            unit.drop(reason)
