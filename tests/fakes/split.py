"""Two executors' pumps in one process, P and D, and a control of a few lines that splits requests over them.

Nothing runs on its own: `step` gives both ports and both pumps a turn, so a test can stop the world between any two
messages. Links are in memory, through the codec.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

from epicycle.engine.engine import Engine
from epicycle.engine.transfer.connector import Connector
from epicycle.engine.transfer.copying import CopyConnector
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.port import TransferPort
from epicycle.transport.config import TransferConfig
from epicycle.transport.link import Receiver
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.columns import I32, pack, unpack_list
from epicycle.transport.wire.plan import Evict, Join
from epicycle.transport.wire.transfer import Export, Import, ToPeer, TransferFailure
from tests.fakes.clock import FakeClock
from tests.fakes.fabric import FakeFabric
from tests.fakes.serving import EPOCH, Ask, Outcome, Serving

LIMITS = TransferConfig(connector="copy", idle_s=30.0)


class Side(Serving):
    """One executor: a pump with a transfer port, driven as `Serving` drives one, and what its reports say failed."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        fabric: FakeFabric,
        limits: TransferConfig = LIMITS,
        connector: Connector | None = None,
        clock: FakeClock | None = None,
        epoch: int = 1,
    ) -> None:
        self.name = name
        self.epoch = epoch
        receiver = cast("Receiver[ToPeer]", fabric.bind(name, epoch, "transfer", ToPeer))
        self.address = receiver.address
        self.fabric = fabric
        self.connector = connector or CopyConnector(Memory.of(engine.pool, engine.heads))
        self.clock = clock or FakeClock()
        self.port = engine.port = TransferPort(self.connector, name, epoch, receiver, limits, self.clock)
        super().__init__(engine, engine.new_pump(EPOCH))
        engine.port = None
        self.failed: list[TransferFailure] = []
        self.freed: list[int] = []

    def meet(self, other: Side) -> None:
        self.port.peer_up(other.name, other.epoch, self.fabric.connect(other.address))

    def lose(self, other: Side) -> None:
        self.port.peer_down(other.name, other.epoch)

    def send_to(self, other: Side, message: Wire) -> None:
        """A message out of turn."""
        self.fabric.connect(other.address).send(message)

    def reset(self) -> None:
        """A new control that knows nothing: everything is free again."""
        self.pump.reset(len(self.reports) + 1)
        self.held.clear()
        self.waiting.clear()
        self.outcomes.clear()
        self.slots, self.pages = list(range(self.engine.plan.slots)), list(range(self.engine.plan.total_pages))

    def join(self, join: Join) -> None:
        self.plan(joins=[join])

    def turn(self) -> None:
        self.port.turn()
        self.step()

    def collect(self) -> None:
        seen = len(self.reports)
        super().collect()
        for report in self.reports[seen:]:
            self.failed.extend(report.failed)
            self.freed.extend(unpack_list(I32, report.freed_slots))

    @property
    def is_even(self) -> bool:
        """Every slot and every page is free."""
        return len(self.slots) == self.engine.plan.slots and sorted(self.pages) == list(
            range(self.engine.plan.total_pages)
        )


class Split:
    """P and D. `submit` reserves on both; prompts longer than P's pool aren't this fake's problem."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        limits: TransferConfig = LIMITS,
        connectors: tuple[Connector | None, Connector | None] = (None, None),
    ) -> None:
        fabric, self.clock = FakeFabric(), FakeClock()
        self.fabric, self.limits = fabric, limits
        self.p = Side(prefill, "ex0", fabric, limits, connectors[0], self.clock)
        self.d = Side(decode, "ex1", fabric, limits, connectors[1], self.clock)
        self.p.meet(self.d)
        self.d.meet(self.p)
        for side in (self.p, self.d, self.p):
            side.port.turn()
        self._transfers = itertools.count(1)
        self._rids = itertools.count(1 << 40)
        self.transfers: dict[int, int] = {}  # by rid
        self.waiting: list[tuple[int, Ask, int]] = []

    def submit(self, ask: Ask, cached_tokens: int = 0) -> int:
        """Queue a request of which D has the first `cached_tokens` already."""
        rid = next(self._rids)
        self.d.outcomes[rid] = Outcome()
        self.waiting.append((rid, ask, cached_tokens))
        return rid

    def admit(self, *, is_d_first: bool = True) -> None:
        while self.waiting and self.p.slots and self.d.slots:
            rid, ask, cached = self.waiting.pop(0)
            transfer = self.transfers[rid] = next(self._transfers)
            to = Import(transfer, self.p.name, self.p.epoch)
            joins = [
                (self.d, self._join(self.d, rid, ask, ask.life_tokens, imports=to, prefix_tokens=cached)),
                (
                    self.p,
                    self._join(self.p, rid, ask, len(ask.prompt), exports=Export(transfer, self.d.name, self.d.epoch)),
                ),
            ]
            for side, join in joins if is_d_first else reversed(joins):
                side.join(join)

    def step(self) -> None:
        self.admit()
        self.p.turn()
        self.d.turn()

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.waiting and all(outcome.fin for outcome in self.d.outcomes.values()) and self.is_even:
                return
            self.step()
        raise AssertionError(f"not ended after {most_steps} steps: {self.d.outcomes}")

    def evict(self, rid: int, *, is_silent: bool = False) -> None:
        """Cancel on both sides, as control does."""
        for side in (self.d, self.p):
            if rid in side.held:
                slot, _ = side.held[rid]
                side.plan(evicts=[Evict(slot=slot, gen=side.gens[slot], is_silent=is_silent)])

    def kill(self, name: str) -> None:
        """The process of one side is gone; the other hears of it."""
        dead, left = (self.p, self.d) if name == "p" else (self.d, self.p)
        dead.connector.close()
        left.lose(dead)

    def replace(self, name: str) -> None:
        """The next incarnation of a killed side, with an empty pool's books."""
        dead, left = (self.p, self.d) if name == "p" else (self.d, self.p)
        fresh = Side(dead.engine, dead.name, self.fabric, self.limits, None, self.clock, dead.epoch + 1)
        setattr(self, name, fresh)
        fresh.meet(left)
        left.meet(fresh)

    @property
    def is_even(self) -> bool:
        return self.p.is_even and self.d.is_even

    def _join(self, side: Side, rid: int, ask: Ask, limit_tokens: int, **parts: object) -> Join:
        slot = side.slots.pop(0)
        side.gens[slot] += 1
        pages = side.take_pages(-(-limit_tokens // side.engine.pool.page_tokens))
        side.held[rid], side.tables[rid] = (slot, pages), pages
        return Join(
            rid=rid,
            gateway=rid % 2,
            slot=slot,
            gen=side.gens[slot],
            prompt=pack(I32, ask.prompt),
            pages=pack(I32, pages),
            limit_tokens=limit_tokens,
            sampling=ask.sampling,
            loops=ask.loops,
            noise_seed=ask.noise_seed,
            **parts,  # type: ignore[arg-type]
        )


def split_all(prefill: Engine, decode: Engine, asks: Sequence[Ask], limits: TransferConfig = LIMITS) -> list[Outcome]:
    """Outcomes of requests split over two engines, in the order of `asks`; every page and slot comes back."""
    split = Split(prefill, decode, limits)
    rids = [split.submit(ask) for ask in asks]
    split.run()
    assert not split.p.outcomes, "nobody hears of P's rows"
    return [split.d.outcomes[rid] for rid in rids]
