"""One transfer at the executor that computes the prompt: what is ready, what is on its way, what is done.

Owns the state of one `Outgoing`: gates (events behind which units lie), units that may be posted, posted writes. The
order of messages is `exchange.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from epicycle.engine.transfer.blocks import Blocks, BlockShape
from epicycle.engine.transfer.connector import Write
from epicycle.engine.transfer.units import HEAD, Cut, Place, Unit, take_units
from epicycle.transport.wire.columns import I32, unpack_list
from epicycle.transport.wire.transfer import Reserved

Ready = Callable[[], bool]
"""Whether what was launched before is complete; never waits, any thread."""


@dataclass(slots=True)
class Posted:
    write: Write
    bytes: int


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """`pages` are this side's, for the whole prompt; `moved_s` is when anything last happened."""

    transfer: int
    target: str
    target_epoch: int
    shape: BlockShape
    prompt_tokens: int
    pages: list[int]
    head_row: int
    moved_s: float
    reserved: Reserved | None = None
    gates: deque[tuple[Ready, list[Unit]]] = field(default_factory=deque)
    ready: set[Unit] = field(default_factory=set)
    unsent: set[Unit] = field(default_factory=set)  # known once reserved
    posted: list[Posted] = field(default_factory=list)
    parts: int = 0
    bytes: int = 0
    early_bytes: int = 0  # posted before the prompt's end was there
    prompt_done_s: float | None = None
    is_committed: bool = False
    is_acked: bool = False
    is_stopped: bool = False  # nothing more will be posted
    is_told: bool = False  # D knows that no write follows
    is_unwanted: bool = False  # the pump waits for the end
    failure: tuple[str, str] = ("", "")

    @property
    def is_under_way(self) -> bool:
        return bool(self.posted or self.gates or self.ready)

    @property
    def is_waiting(self) -> bool:
        """For the pump alone: nothing of it has been computed since the last look, and nothing is on its way."""
        return not (self.is_under_way or self.is_committed or self.is_stopped or self.is_unwanted)

    @property
    def cut(self) -> Cut:
        """What travels; once reserved."""
        assert self.reserved is not None
        return Cut(self.shape, self.reserved.first_token // self.shape.page_tokens, self.reserved.prompt_tokens)

    def reserve(self, reserved: Reserved) -> None:
        self.reserved = reserved
        self.unsent = self.cut.units()
        self.ready &= self.unsent

    def open_gates(self, now_s: float) -> None:
        """Units whose events are complete may be posted."""
        while self.gates and self.gates[0][0]():
            _, units = self.gates.popleft()
            self.ready.update(units if self.reserved is None else self.unsent.intersection(units))
            if (0, HEAD) in units:
                self.prompt_done_s = now_s

    def take(self, most_bytes: int) -> tuple[list[Unit], int]:
        """(units, bytes) of the next write; none where nothing is ready or `most_bytes` hold no unit."""
        units = take_units(self.cut, self.ready, most_bytes)
        self.ready.difference_update(units)
        self.unsent.difference_update(units)
        return units, sum(self.cut.bytes_of(unit) for unit in units)

    def places(self, here: Blocks, there: Blocks) -> tuple[Place, Place]:
        """Where the prompt lies on this side and on the other."""
        assert self.reserved is not None
        first = self.cut.first_page
        return (
            Place(here, 0, self.pages, self.head_row),
            Place(there, first, unpack_list(I32, self.reserved.pages), self.reserved.head_row),
        )

    def stop(self) -> None:
        """Post nothing more."""
        self.is_stopped = True
        self.gates.clear()
        self.ready.clear()
