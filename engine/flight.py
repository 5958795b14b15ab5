"""Ticks on their way: launched, not yet harvested, in the order of their launches; and slots that wait for them.

Owns their queue, how many there were, how long anybody waits for the oldest, and when a slot is free: once the last
tick and the last copy that may touch it are complete. It must not know what a tick does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from epicycle.engine.errors import TickError
from epicycle.engine.host_pages import Copies
from epicycle.engine.route import Chunk, TickWork
from epicycle.engine.tick import Ticket, TickResult
from epicycle.transport.tick_counters import TickCounters

WAIT_STEP_S = 2e-5  # between two looks at a tick that isn't complete
WAIT_S = 0.25  # the longest wait of one call
LOST_TICK_S = 120.0  # a tick that isn't complete after so long never will be


@dataclass(frozen=True, slots=True)
class Launched:
    """A tick on its way, with the chunks whose last loop it runs. Chunks change when launched, so depths are kept."""

    ticket: Ticket
    work: TickWork
    finished: list[Chunk]
    prompt_depths: set[int]

    def count(self, counters: TickCounters, result: TickResult) -> None:
        rows = sum(1 for loops in result.ran if loops) * self.work.loops
        depths = self.prompt_depths | {loops - 1 for loops in result.ran if loops}
        counters.ticks += self.work.loops
        counters.decode_row_loops += rows
        counters.prompt_row_loops += self.work.prompt_rows
        counters.rows_in_ticks += rows + self.work.prompt_rows
        counters.mixed_depth_ticks += len(depths) > 1


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A slot that is free once `ticks` ticks are harvested and the copies into its pages are complete."""

    ticks: int
    slot: int
    gen: int
    copies: Copies | None


class Flight:
    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.launched = 0  # ticks so far
        self.harvested = 0
        self._sleep = sleep
        self._ticks: deque[Launched] = deque()
        self._waited_s = 0.0  # for the oldest
        self._leaving: deque[_Leaving] = deque()

    def __len__(self) -> int:
        """Ticks on their way."""
        return len(self._ticks)

    @property
    def is_leaving(self) -> bool:
        """A slot waits to be free."""
        return bool(self._leaving)

    def leave(self, slot: int, gen: int, copies: Copies | None) -> None:
        """The slot's row has ended: nothing launched from now on runs it."""
        self._leaving.append(_Leaving(self.launched, slot, gen, copies))

    def free_slots(self) -> list[tuple[int, int]]:
        """(slot, gen) that are free now, from here on nobody's; in the order in which they were left."""
        freed = []
        while self._leaving and self._is_free(self._leaving[0]):
            leaving = self._leaving.popleft()
            freed.append((leaving.slot, leaving.gen))
        return freed

    def _is_free(self, leaving: _Leaving) -> bool:
        return leaving.ticks <= self.harvested and (leaving.copies is None or leaving.copies.is_complete())

    def forget_slots(self) -> None:
        self._leaving.clear()

    def add(self, launched: Launched) -> None:
        self.launched += 1
        self._ticks.append(launched)

    def take(self) -> Launched | None:
        """The oldest tick once it is complete, from here on harvested; never waits."""
        if not self._ticks or not self._ticks[0].ticket.is_complete():
            return None
        self.harvested += 1
        self._waited_s = 0.0
        return self._ticks.popleft()

    def wait(self) -> bool:
        """Give the oldest tick time to become complete; False where it isn't by then. Raises TickError."""
        ticket, until_s = self._ticks[0].ticket, self._waited_s + WAIT_S
        while not ticket.is_complete():
            if self._waited_s >= LOST_TICK_S:
                raise TickError("lost_tick", f"a tick is not complete {LOST_TICK_S} s after its launch")
            if self._waited_s >= until_s:
                return False
            self.pause()
            self._waited_s += WAIT_STEP_S
        return True

    def pause(self) -> None:
        """Between two looks at whatever is on its way."""
        self._sleep(WAIT_STEP_S)
