"""Mock pumps that hand each other prompts: what `transport/wire/transfer.py` says of Joins, Evicts and reports, without
links or bytes.

A `Hub` stands for the transfer links of one world. It knows how far every transfer is, and a test may hold it at a
stage, or let it fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from epicycle.actors.mock_pump import MockEngine, MockOutput, MockPump
from epicycle.actors.mock_row import MockRow
from epicycle.transport.wire.plan import Evict, Join
from epicycle.transport.wire.transfer import TransferFailure

STAGES = ("reserve", "compute", "write", "commit", "ack")


@dataclass
class Progress:
    """One transfer. Its stages happen in the order of STAGES, apart from the first two, which happen in any."""

    source_epoch: int
    target_epoch: int
    done: set[str] = field(default_factory=set)
    is_stopped: bool = False  # D wants no more writes
    are_writes_ended: bool = False  # P will write no more


@dataclass
class Hub:
    """`held`: the stage that nobody reaches for now."""

    held: str = ""
    transfers: dict[int, Progress] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)  # epochs of executors that were killed
    to_fail: dict[int, list[TransferFailure]] = field(default_factory=dict)  # by epoch: to be reported by it next
    written: int = 0  # transfers that came to their end

    def of(self, join: Join, epoch: int) -> Progress:
        """The progress of a Join's transfer; `epoch` is the executor's that got it."""
        if join.imports is not None:
            number, source, target = join.imports.transfer, join.imports.source_epoch, epoch
        else:
            assert join.exports is not None
            number, source, target = join.exports.transfer, epoch, join.exports.target_epoch
        return self.transfers.setdefault(number, Progress(source, target))

    def reach(self, progress: Progress, stage: str) -> bool:
        """Whether the stage is done, now or earlier; those before it must be."""
        ready = all(earlier in progress.done for earlier in STAGES[: STAGES.index(stage)])
        if stage in progress.done or ((ready or stage in STAGES[:2]) and stage != self.held):
            progress.done.add(stage)
            return True
        return False


class SplitPump(MockPump):
    """A MockPump of either role. A row with `imports` samples once its KV has come, one with `exports` never does."""

    def __init__(self, engine: MockEngine, epoch: int, hub: Hub) -> None:
        super().__init__(engine.capabilities(), epoch)
        self.hub = hub
        self._leaving: list[MockRow] = []  # evicted, and still written to

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._leaving = []
        self._unacked: list[Progress] = []  # of rows that run
        self._told: set[int] = set()  # transfers reported as failed

    def has_work(self) -> bool:
        self._move()
        return super().has_work() or bool(self.hub.to_fail.get(self._epoch))

    def _is_starved(self, row: MockRow) -> bool:
        """True too for a row whose prompt isn't here, or that has computed it for another."""
        if row.join.imports is not None and row.written_tokens < row.prompt_tokens:
            return "commit" not in self.hub.of(row.join, self._epoch).done
        if row.join.exports is not None:
            return not row.prefill_ticks or self.hub.held == "compute"
        return super()._is_starved(row)

    def _join(self, join: Join) -> None:
        super()._join(join)
        if join.imports is not None:
            self._rows[join.slot].prefill_ticks = 1  # the head row, once it is here

    def _move(self) -> None:
        """What this side of each transfer can do now."""
        for row in list(self._rows.values()):
            if row.join.imports is not None and row.written_tokens < row.prompt_tokens:
                self.hub.reach(self.hub.of(row.join, self._epoch), "reserve")
            elif row.join.exports is not None:
                self._export(row)
        self._unacked = [progress for progress in self._unacked if not self.hub.reach(progress, "ack")]
        for progress in self.hub.transfers.values():
            if progress.source_epoch in (self._epoch, *self.hub.dead) and progress.is_stopped:
                progress.are_writes_ended = True
        for row in [row for row in self._leaving if self.hub.of(row.join, self._epoch).are_writes_ended]:
            self._leaving.remove(row)
            self._free(row)

    def _export(self, row: MockRow) -> None:
        progress = self.hub.of(row.join, self._epoch)
        if not row.prefill_ticks and self.hub.reach(progress, "compute"):
            for stage in ("write", "commit"):
                self.hub.reach(progress, stage)
        if "ack" in progress.done:
            self.hub.written += 1
            del self._rows[row.join.slot]
            self._free(row)

    def _prefill(self, row: MockRow) -> None:
        if row.join.exports is None:
            super()._prefill(row)
            if row.join.imports is not None:
                self._unacked.append(self.hub.of(row.join, self._epoch))
            return
        row.prefill_ticks -= 1
        if not row.prefill_ticks:
            self._pages.write(row.join)
            row.written_tokens = row.prompt_tokens
            self._moved[row.join.slot] = (row.join.gen, row.written_tokens)

    def _evict(self, evict: Evict) -> None:
        row = self._find(evict.slot, evict.gen)
        if row is None or evict.reason == "preempt" or (row.join.imports is None and row.join.exports is None):
            super()._evict(evict)
            return
        progress = self.hub.of(row.join, self._epoch)
        if row.join.exports is not None:
            progress.are_writes_ended = True
            del self._rows[evict.slot]
            self._free(row)
            return
        is_running = row.written_tokens >= row.prompt_tokens
        if evict.is_silent and is_running:
            return
        self._finish(row, evict.reason, message=evict.message)
        if evict.is_silent:
            self._fins[row.join.gateway].pop()
        if not is_running:  # P may still write: the slot is free once it has said that it doesn't
            self._freed.pop()
            self._leaving.append(row)
            progress.is_stopped = True

    def _free(self, row: MockRow) -> None:
        self._freed.append((row.join.slot, row.join.gen))
        self._has_report = True

    def collect(self) -> MockOutput:
        failed = [*self.hub.to_fail.pop(self._epoch, []), *self._failed_with_peers()]
        if not failed:
            return super().collect()
        self._has_report = True
        output = super().collect()
        assert output.report is not None
        return MockOutput(msgspec.structs.replace(output.report, failed=failed), output.to_gateways)

    def _failed_with_peers(self) -> list[TransferFailure]:
        failures = []
        for row in self._rows.values():
            part = row.join.imports or row.join.exports
            if part is None or part.transfer in self._told:
                continue
            progress = self.hub.of(row.join, self._epoch)
            last = "commit" if row.join.imports is not None else "ack"
            if {progress.source_epoch, progress.target_epoch} & self.hub.dead and last not in progress.done:
                self._told.add(part.transfer)
                failures.append(TransferFailure(part.transfer, "peer_down", "killed by the test"))
        return failures


class SplitEngine(MockEngine):
    """Makes pumps that share one hub; the test sets it."""

    hub: Hub

    def new_pump(self, epoch: int) -> SplitPump:
        return SplitPump(self, epoch, self.hub)


def split_engine(hub: Hub) -> type[SplitEngine]:
    """An engine class for `executor.KINDS`."""
    return type("HubEngine", (SplitEngine,), {"hub": hub})
