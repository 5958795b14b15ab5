"""Ended requests in the order they came in: a trace's rows follow their timestamps.

Owns the requests that have ended while an earlier one still runs; no more than `limit` wait so, then rows go out of
order rather than pile up behind one long request.
"""

from __future__ import annotations

from epicycle.actors.gateway.record_rows import Ended

HELD_LIMIT = 1024


class ArrivalOrder:
    def __init__(self, limit: int = HELD_LIMIT) -> None:
        self._limit = limit
        self._held = 0
        self._entries: dict[int, Ended | None] = {}  # by first rid, in order of arrival; None: still runs

    def enter(self, rid: int) -> None:
        self._entries[rid] = None

    def leave(self, ended: Ended) -> list[Ended]:
        """What may be written now that `ended` has ended, oldest first."""
        self._entries[ended.rids[0]] = ended
        self._held += 1
        ready = []
        for rid, entry in list(self._entries.items()) if self._must_pass() else self._first():
            if entry is not None:
                ready.append(entry)
                del self._entries[rid]
        self._held -= len(ready)
        return ready

    def _must_pass(self) -> bool:
        return self._held > self._limit

    def _first(self) -> list[tuple[int, Ended]]:
        """The ended ones before the first that runs."""
        found = []
        for rid, entry in self._entries.items():
            if entry is None:
                break
            found.append((rid, entry))
        return found
