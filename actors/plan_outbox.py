"""The one pending Plan: what the executor has not been told yet, merged until the link takes it.

Owns the sequence number and the Reset that comes before everything else. It must not know pages or requests beyond
what a Plan holds.
"""

from __future__ import annotations

from epicycle.transport.errors import LinkFull
from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.plan import Drop, Evict, Grow, Join, Plan, Reset, Resume

JOIN_BYTES = 16 << 20  # prompts and tables of one Plan; a frame holds 64 MiB


class PlanOutbox:
    """For one executor epoch. `flush` never waits; what was refused stays and merges with what comes."""

    def __init__(self, sender: Sender, epoch: int, control_epoch: int) -> None:
        self.sender = sender
        self.plans = 0
        self.merges = 0  # changes that met a plan the link had refused
        self._epoch = epoch
        self._control_epoch = control_epoch
        self._reset: Reset | None = Reset(epoch=epoch, control_epoch=control_epoch)
        self._joins: dict[int, Join] = {}
        self._grows: dict[int, Grow] = {}
        self._evicts: dict[int, Evict] = {}
        self._resumes: dict[int, Resume] = {}
        self._drops: list[Drop] = []
        self._spills: list[tuple[int, int]] = []
        self._is_refused = False

    @property
    def has_pending(self) -> bool:
        return bool(self._reset) or self._has_changes

    @property
    def _has_changes(self) -> bool:
        return bool(self._joins or self._grows or self._evicts or self._resumes or self._drops or self._spills)

    def is_unsent(self, slot: int) -> bool:
        """The executor has not been told of the row in `slot`."""
        return slot in self._joins or slot in self._resumes

    def join(self, join: Join) -> None:
        self._count()
        self._joins[join.slot] = join

    def grow(self, grow: Grow) -> None:
        self._count()
        earlier = self._grows.get(grow.slot)
        if earlier is not None and earlier.gen == grow.gen:
            grow = Grow(grow.slot, grow.gen, earlier.pages + grow.pages, grow.limit_tokens, grow.is_final)
        self._grows[grow.slot] = grow

    def evict(self, evict: Evict) -> None:
        self._count()
        self._grows.pop(evict.slot, None)
        self._evicts[evict.slot] = evict

    def resume(self, resume: Resume) -> None:
        self._count()
        self._resumes[resume.slot] = resume

    def drop(self, drop: Drop) -> None:
        self._count()
        self._drops.append(drop)

    def spill(self, spills: list[tuple[int, int]]) -> None:
        """(page, host page) to copy before anything else of the plan; what claims the page is in this plan or later."""
        self._spills += spills

    def take_back(self, slot: int) -> Resume | None:
        """Take back a resume that was not sent; None when it was."""
        self._grows.pop(slot, None)
        return self._resumes.pop(slot, None)

    def withdraw(self, slot: int) -> Join | None:
        """Take back a join that was not sent; None when it was."""
        return self._joins.pop(slot, None)

    def forget(self, slot: int) -> None:
        """The row in `slot` is gone: what is pending about it is pointless."""
        self._grows.pop(slot, None)
        self._evicts.pop(slot, None)

    def flush(self) -> list[Join]:
        """Send what is pending; the joins that are now on their way."""
        sent: list[Join] = []
        try:
            if self._reset is not None:
                self.sender.send(self._reset)
                self._reset = None
            while self._has_changes:
                sent += self._send_plan()
        except LinkFull:
            self._is_refused = True
        else:
            self._is_refused = False
        return sent

    def _send_plan(self) -> list[Join]:
        joins = self._first_joins()
        plan = Plan(
            epoch=self._epoch,
            seq=self.plans + 1,
            joins=joins,
            grows=list(self._grows.values()),
            evicts=list(self._evicts.values()),
            control_epoch=self._control_epoch,
            resumes=list(self._resumes.values()),
            drops=self._drops.copy(),
            spilled_pages=pack(I32, [page for page, _ in self._spills]),
            spilled_to=pack(I32, [host_page for _, host_page in self._spills]),
        )
        self.sender.send(plan)
        self.plans += 1
        self._resumes.clear()
        self._drops.clear()
        self._spills.clear()
        self._grows.clear()
        self._evicts.clear()
        for join in joins:
            del self._joins[join.slot]
        return joins

    def _first_joins(self) -> list[Join]:
        """As many pending joins as one frame should carry, at least one."""
        joins: list[Join] = []
        left = JOIN_BYTES
        for join in self._joins.values():
            left -= len(join.prompt) + len(join.pages) + len(join.loops.exit_trace)
            if joins and left < 0:
                break
            joins.append(join)
        return joins

    def _count(self) -> None:
        self.merges += self._is_refused
