"""`Offline` over two engines: one computes prompts, the other decodes them, joined by a connector in this process.

Owns a scheduler of a few lines for the engine that computes prompts, and the transfers between the two. What comes out
is read as from `Offline`.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import cast

import msgspec

from epicycle.engine.engine import Engine
from epicycle.kvstore.page_pool import PagePool
from epicycle.kvstore.reserve import pages_for
from epicycle.tools.offline import Offline, Request
from epicycle.transport.config import TransferConfig
from epicycle.transport.link import Receiver
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.columns import I32, pack, unpack
from epicycle.transport.wire.plan import Join, Plan, StepReport
from epicycle.transport.wire.transfer import Export, Import, ToPeer, TransferFailure

PREFILL, DECODE = "ex0", "ex1"


class _Prompts:
    """The engine that computes prompts. A request waits until it has a slot and pages."""

    def __init__(self, engine: Engine) -> None:
        self.pump = engine.new_pump(epoch=1)
        self._page_tokens = engine.pool.page_tokens
        self._pool = PagePool(engine.plan.total_pages)
        self._gens = [0] * engine.plan.slots
        self._free_slots = list(reversed(range(engine.plan.slots)))
        self._waiting: deque[tuple[Join, Export]] = deque()
        self._seq = 0

    def compute(self, join: Join, part: Export) -> None:
        """The prompt of another's Join."""
        self._waiting.append((join, part))

    def step(self) -> None:
        joins: list[Join] = []
        while self._waiting and self._free_slots and self._pages(self._waiting[0][0]) <= self._pool.free_pages:
            joins.append(self._join(*self._waiting.popleft()))
        if joins:
            self._seq += 1
            self.pump.apply(Plan(epoch=1, seq=self._seq, joins=joins))
        self.pump.tick()
        output = self.pump.collect()
        assert not output.to_gateways, "nobody hears of a row that computes a prompt"
        if output.report is not None:
            _raise_failures(output.report.failed)
            for slot in unpack(I32, output.report.freed_slots):
                self._pool.release(slot, has_prompt=False)
                self._free_slots.append(slot)

    def _pages(self, join: Join) -> int:
        return pages_for(len(join.prompt) // 4, self._page_tokens)

    def _join(self, join: Join, part: Export) -> Join:
        slot = self._free_slots.pop()
        self._gens[slot] += 1
        table = self._pool.claim(slot, self._pages(join), (), 0)
        return msgspec.structs.replace(
            join,
            slot=slot,
            gen=self._gens[slot],
            pages=pack(I32, table),
            limit_tokens=len(join.prompt) // 4,
            prefix_tokens=0,
            exports=part,
        )


class SplitOffline(Offline):
    """`prefill` computes the prompts of what `engine` decodes. `close` ends the transfers' threads."""

    def __init__(
        self,
        engine: Engine,
        prefill: Engine,
        limits: TransferConfig,
        *,
        grow_tokens: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        fabric = LocalFabric()
        receivers = {
            name: cast("Receiver[ToPeer]", fabric.bind(name, 1, "transfer", ToPeer)) for name in (PREFILL, DECODE)
        }
        self._ports = [
            each.open_port(limits, name, 1, receivers[name]) for each, name in ((prefill, PREFILL), (engine, DECODE))
        ]
        super().__init__(engine, grow_tokens=grow_tokens, prefix_cache=prefix_cache)
        self._prompts = _Prompts(prefill)
        self._transfers = itertools.count(1)
        for port, other in zip(self._ports, (DECODE, PREFILL), strict=True):
            port.start()
            port.peer_up(other, 1, fabric.connect(receivers[other].address))

    def step(self) -> bool:
        self._prompts.step()
        return super().step()

    def close(self) -> None:
        for port in self._ports:
            port.close()

    def _join(self, rid: int, request: Request, life_pages: int) -> Join:
        join = super()._join(rid, request, life_pages)
        number = next(self._transfers)
        self._prompts.compute(join, Export(number, DECODE, 1))
        return msgspec.structs.replace(join, imports=Import(number, PREFILL, 1))

    def _publish(self, report: StepReport) -> None:
        _raise_failures(report.failed)
        super()._publish(report)


def _raise_failures(failed: list[TransferFailure]) -> None:
    """Nothing should fail here: no peer dies, and copies don't break."""
    if failed:
        raise RuntimeError(f"transfer {failed[0].transfer} has failed: {failed[0].code}: {failed[0].message}")
