"""A tick whose results come late, as a GPU's do: each is complete only after it has been asked for a few times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epicycle.engine.device_tick import DeviceTick, make_tensors
from epicycle.engine.engine import Engine
from epicycle.engine.graph_runner import PlainRunner
from epicycle.engine.pump import Pump
from epicycle.engine.route import Resident, TickWork
from epicycle.engine.tick import Ticket, TickResult
from epicycle.engine.tick_backend import plain_backend
from epicycle.engine.tick_inputs import Ladder
from tests.fakes.serving import EPOCH


@dataclass
class LateTicket:
    ticket: Ticket
    asks_left: int

    def is_complete(self) -> bool:
        self.asks_left -= 1
        return self.asks_left < 0 and self.ticket.is_complete()

    def result(self) -> TickResult:
        assert self.asks_left < 0
        return self.ticket.result()


class LateTick:
    """Meets `tick.Tick` over another; `launched` are the works so far."""

    def __init__(self, tick: DeviceTick, asks: int) -> None:
        self.most_chunks = tick.most_chunks
        self.most_prompt_rows = tick.most_prompt_rows
        self.takes_whole_tokens = tick.takes_whole_tokens
        self.launched: list[TickWork] = []
        self._tick = tick
        self._asks = asks

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        return self._tick.prompt_room(decode_rows, rows)

    def launch(self, work: TickWork) -> LateTicket:
        self.launched.append(work)
        return LateTicket(self._tick.launch(work), self._asks)

    def launch_heads(self, residents: list[Resident]) -> LateTicket:
        return LateTicket(self._tick.launch_heads(residents), self._asks)

    def drop(self, slot: int) -> None:
        self._tick.drop(slot)


def late_pump(
    engine: Engine, asks: int, clock: Callable[[], float] = lambda: 0.0, epoch: int = EPOCH
) -> tuple[Pump, LateTick]:
    """A pump of `engine` over a late device tick."""
    slots = engine.new_slots()
    tensors = make_tensors(slots, Ladder.of(engine.plan.slots, engine.chunk_tokens))
    backend = plain_backend(engine.model, engine.pool, tensors, engine.rule, engine.rule_entry)
    tick = LateTick(DeviceTick(engine.model, tensors, backend, PlainRunner()), asks)
    return engine.make_pump(slots, tick, epoch, clock), tick
