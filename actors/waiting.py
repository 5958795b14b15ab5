"""The waiting queue: admitted nowhere yet, in the order in which they will be looked at.

Owns the entries. It must not know pools, slots or verdicts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from epicycle.actors.slot_table import Rank
from epicycle.transport.wire.request import Submit


@dataclass(slots=True)
class Entry:
    """One waiting request. `pages` is what it claims when it gets in; `bypasses` counts those that passed it.

    `keys` are those of its prompt's full pages, made once; `most_hits` of them may be found in the prefix cache.
    `is_local`: the executor that decodes it computes its prompt too.
    """

    submit: Submit
    arrived_s: float
    pages: int
    key: float
    seq: int
    keys: tuple[bytes, ...] = ()
    most_hits: int = 0
    is_local: bool = False
    bypasses: int = 0

    @property
    def rank(self) -> Rank:
        return Rank(self.key, self.seq, self.submit.priority)

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.prompt) // 4

    @property
    def most_tokens(self) -> int:
        """Of the context it may need."""
        return self.prompt_tokens + self.submit.sampling.max_tokens


class WaitingQueue:
    """Sorted by (key, arrival). Lookup by rid is O(1), insertion and removal are a search and a memmove."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, int]] = []
        self._entries: dict[int, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, rid: int) -> bool:
        return rid in self._entries

    def add(
        self,
        submit: Submit,
        arrived_s: float,
        pages: int,
        key: float,
        keys: tuple[bytes, ...] = (),
        most_hits: int = 0,
        *,
        is_local: bool = False,
    ) -> None:
        assert submit.rid not in self._entries, submit.rid
        self._arrivals += 1
        self._entries[submit.rid] = Entry(submit, arrived_s, pages, key, self._arrivals, keys, most_hits, is_local)
        insort(self._order, (key, self._arrivals, submit.rid))

    def remove(self, rid: int) -> Entry | None:
        """Take one out; None when it isn't here."""
        entry = self._entries.pop(rid, None)
        if entry is not None:
            del self._order[bisect_left(self._order, (entry.key, entry.seq, rid))]
        return entry

    def head(self, count: int) -> list[Entry]:
        """The first `count` in order."""
        return [self._entries[rid] for _, _, rid in self._order[:count]]

    def entries(self) -> Iterable[Entry]:
        return tuple(self._entries.values())
