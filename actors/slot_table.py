"""Who is in which slot: columns indexed by slot number, and the way from a rid to its slot.

Owns slots and generations. A slot's gen grows when it is given out, so that messages about its last tenant are told
apart. It must not know pages, plans or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FREE = -1


class Rank(NamedTuple):
    """Who goes before whom, the smallest first: by order in the queue (aged priority), then by arrival."""

    order: float
    arrival: int
    priority: int


NO_RANK = Rank(0.0, 0, 0)
LAST_RANK = Rank(math.inf, 0, 0)


class SlotTable:
    """Plain columns: a report touches a few list cells a row, and nothing is made. Callers may read every column."""

    def __init__(self, slots: int) -> None:
        self.rids = [FREE] * slots
        self.gens = [0] * slots
        self.gateways = [0] * slots
        self.ranks = [NO_RANK] * slots
        self.prompt_tokens = [0] * slots
        self.max_tokens = [0] * slots
        self.tokens = [0] * slots  # positions that hold KV, as last reported
        self.is_evicted = [False] * slots  # the executor has been told, or will be with the pending Plan
        self.prefilling = 0  # rows whose prompt isn't written yet
        self.completed: list[int] = []  # slots whose prompt has just been written, for the caller of `advance` to take
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[int]:
        """The slots in use, oldest row first."""
        return iter(tuple(self._slot_of.values()))

    def has_prompt(self, slot: int) -> bool:
        """The whole prompt is written, or its writing is under way and comes before whatever is launched now."""
        return self.tokens[slot] >= self.prompt_tokens[slot]

    def take_completed(self) -> list[int]:
        """Slots whose prompts `advance` found complete since the last call."""
        completed, self.completed = self.completed, []
        return completed

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def slot_of(self, rid: int) -> int | None:
        return self._slot_of.get(rid)

    def is_current(self, slot: int, gen: int) -> bool:
        """True when (slot, gen) names a row that is here."""
        return 0 <= slot < len(self.rids) and self.gens[slot] == gen and self.rids[slot] != FREE

    def take(
        self, rid: int, gateway: int, prompt_tokens: int, max_tokens: int, rank: Rank = NO_RANK, *, tokens: int = 0
    ) -> int:
        """Give a free slot to `rid`, `tokens` positions of which hold KV already; its gen grows."""
        assert rid not in self._slot_of, rid
        slot = self._free.pop()
        self._slot_of[rid] = slot
        self.rids[slot] = rid
        self.gens[slot] += 1
        self.gateways[slot] = gateway
        self.ranks[slot] = rank
        self.prompt_tokens[slot] = prompt_tokens
        self.max_tokens[slot] = max_tokens
        self.tokens[slot] = tokens
        self.is_evicted[slot] = False
        self.prefilling += not self.has_prompt(slot)
        return slot

    def advance(self, slots: Sequence[int], gens: Sequence[int], tokens: Sequence[int]) -> int:
        """Columns of a report: the row of (slot, gen) holds so many positions. Returns how many named no row here.

        The one loop that runs for every row of every step, so it is written out.
        """
        rids, gens_here, held, prompts = self.rids, self.gens, self.tokens, self.prompt_tokens
        stale, count = 0, len(rids)
        for slot, gen, now in zip(slots, gens, tokens, strict=True):
            if not 0 <= slot < count or gens_here[slot] != gen or rids[slot] == FREE:
                stale += 1
                continue
            if held[slot] < prompts[slot] <= now:
                self.prefilling -= 1
                self.completed.append(slot)
            held[slot] = now
        return stale

    def release(self, slot: int) -> int:
        """Free the slot; the rid that had it."""
        rid = self.rids[slot]
        assert rid != FREE, slot
        if not self.has_prompt(slot):
            self.prefilling -= 1
        self.rids[slot] = FREE
        del self._slot_of[rid]
        self._free.append(slot)
        return rid
