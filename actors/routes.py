"""Which executor a request goes to: what each has free, what it has cached, how busy it is.

Owns admission's picture of the executors: their facts, and room as last told less what was given away since. It must
not know the queue's order, slots or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from epicycle.actors import refusals
from epicycle.actors.control_messages import Room
from epicycle.actors.prefix_policy import PrefixPolicy
from epicycle.actors.waiting import Entry
from epicycle.kvstore.reserve import ReserveRule
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import Rejected, Submit


class PrefixView(Protocol):
    """What an executor has cached. Counts of leading keys: how many name pages, how many of those cost no room."""

    def known(self, keys: Sequence[bytes]) -> int: ...

    def in_use(self, keys: Sequence[bytes]) -> int: ...

    def holds_session(self, session: Hashable) -> bool: ...


@dataclass(slots=True)
class Route:
    """One executor that takes requests. `slots` and `pages` are what may still be given away."""

    epoch: int
    facts: Capabilities
    rule: ReserveRule
    prefix: PrefixPolicy
    slots: int = 0
    pages: int = 0

    @property
    def load(self) -> float:
        """The fuller of the two, slots and pages: 0 is idle, 1 is full."""
        return 1.0 - min(self.slots / self.facts.slots, self.pages / self.facts.total_pages)


class Routes:
    """The executors by epoch. `cache` may be asked about the cached pages of one at any time."""

    def __init__(self, cache: Callable[[int], PrefixView]) -> None:
        self._cache = cache
        self._routes: dict[int, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def first(self) -> Route:
        """Any executor, for what is the same on all: page size, layout, the keys of prompts."""
        return next(iter(self._routes.values()))

    @property
    def are_full(self) -> bool:
        return all(route.slots == 0 for route in self._routes.values())

    def add(self, route: Route) -> None:
        self._routes[route.epoch] = route

    def remove(self, epoch: int) -> None:
        self._routes.pop(epoch, None)

    def update(self, room: Room) -> bool:
        """Whether that is news."""
        route = self._routes.get(room.executor_epoch)
        if route is None or (route.slots, route.pages) == (room.slots, room.pages):
            return False
        route.slots, route.pages = room.slots, room.pages
        return True

    def refusal(self, submit: Submit) -> Rejected | None:
        """Why the request fits no executor, told of the roomiest; None when one could run it."""
        tokens, outputs = len(submit.prompt) // 4, submit.sampling.max_tokens
        return refusals.fits_nowhere(submit.rid, tokens, outputs, [route.facts for route in self._routes.values()])

    def known(self, keys: Sequence[bytes]) -> int:
        """Leading keys that the executor with most of them has cached."""
        return max(self._cache(epoch).known(keys) for epoch in self._routes)

    def take(self, entry: Entry) -> Route | None:
        """Claim room for a request on the best executor that has it; None when none has.

        Best is where the least is left to do: the share of its pages that it doesn't find there, plus the load. So a
        long prefix outweighs load, a short one doesn't heap everything on one executor. A session goes where its pin is
        as long as there is room.
        """
        best: tuple[float, int] | None = None
        costs: dict[int, int] = {}
        tokens = len(entry.submit.prompt) // 4 + entry.submit.sampling.max_tokens
        for route in self._routes.values():
            if route.slots == 0 or tokens > route.facts.context_tokens:
                continue
            cost = entry.pages - self._cache(route.epoch).in_use(entry.keys[: entry.most_hits])
            if cost > route.pages:
                continue
            costs[route.epoch] = cost
            score = (self._score(entry, route), route.epoch) if len(self._routes) > 1 else (0.0, route.epoch)
            best = score if best is None else min(best, score)
        if best is None:
            return None
        chosen = self._routes[best[1]]
        chosen.slots -= 1
        chosen.pages -= costs[chosen.epoch]
        return chosen

    def _score(self, entry: Entry, route: Route) -> float:
        cache, session = self._cache(route.epoch), route.prefix.session(entry.submit)
        if session is not None and cache.holds_session(session):
            return route.load - 1.0
        missing = entry.pages - cache.known(entry.keys[: entry.most_hits])
        return route.load + missing / entry.pages
