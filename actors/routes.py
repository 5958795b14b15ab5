"""Which executors a request goes to: what each has free, what it has cached, how busy it is.

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
from epicycle.actors.slot_table import LAST_RANK, Rank
from epicycle.actors.waiting import Entry
from epicycle.kvstore.reserve import ReserveRule, pages_for
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import Rejected, Submit

PREFILL = "prefill"


class CacheView(Protocol):
    """What an executor has cached. Counts of leading keys: how many name pages, how many of those cost no room."""

    def known(self, keys: Sequence[bytes]) -> int: ...

    def in_use(self, keys: Sequence[bytes]) -> int: ...

    def holds_session(self, session: Hashable) -> bool: ...


class UnitView(Protocol):
    """What may be asked about an executor at any time. `backlog_tokens`: of prompts that it has yet to compute."""

    @property
    def leases(self) -> CacheView: ...

    @property
    def backlog_tokens(self) -> int: ...


@dataclass(slots=True)
class Route:
    """One executor. `slots` and `pages` are what may still be given away. `role`: full, decode, or prefill, which
    computes prompts for those that decode.
    """

    epoch: int
    facts: Capabilities
    rule: ReserveRule
    prefix: PrefixPolicy
    role: str = "full"
    slots: int = 0
    pages: int = 0
    before: Rank = LAST_RANK  # of saved requests, which go first
    booked_tokens: int = 0  # of prompts given to it since then

    @property
    def load(self) -> float:
        """The fuller of the two, slots and pages: 0 is idle, 1 is full."""
        return 1.0 - min(self.slots / self.facts.slots, self.pages / self.facts.total_pages)

    def take(self, cost_pages: int) -> None:
        self.slots -= 1
        self.pages -= cost_pages


@dataclass(frozen=True, slots=True)
class Choice:
    """Who decodes a request, and who computes its prompt; None: the same."""

    target: Route
    source: Route | None = None


class Routes:
    """The executors by epoch. `unit` finds one that is up; `least_tokens`: fewer left to compute are not worth
    another executor.
    """

    def __init__(self, unit: Callable[[int], UnitView], least_tokens: int) -> None:
        self._unit = unit
        self._least_tokens = least_tokens
        self._routes: dict[int, Route] = {}
        self._targets: list[Route] = []
        self._sources: list[Route] = []

    @property
    def are_open(self) -> bool:
        """Somebody can decode."""
        return bool(self._targets)

    @property
    def first(self) -> Route:
        """Any executor that decodes, for what is the same on all: page size, layout, the keys of prompts."""
        return self._targets[0]

    @property
    def are_full(self) -> bool:
        return all(route.slots == 0 for route in self._targets)

    def add(self, route: Route) -> None:
        self._routes[route.epoch] = route
        self._sort()

    def remove(self, epoch: int) -> None:
        self._routes.pop(epoch, None)
        self._sort()

    def update(self, room: Room) -> bool:
        """Whether that is news."""
        route = self._routes.get(room.executor_epoch)
        if route is None:
            return False
        route.booked_tokens = 0
        if (route.slots, route.pages, route.before) == (room.slots, room.pages, room.before):
            return False
        route.slots, route.pages, route.before = room.slots, room.pages, room.before
        return True

    def refusal(self, submit: Submit) -> Rejected | None:
        """Why the request fits no executor that decodes, told of the roomiest; None when one could run it."""
        tokens, outputs = len(submit.prompt) // 4, submit.sampling.max_tokens
        return refusals.fits_nowhere(submit.rid, tokens, outputs, [route.facts for route in self._targets])

    def known(self, keys: Sequence[bytes]) -> int:
        """Leading keys that the executor with most of them has cached."""
        return max(self._unit(epoch).leases.known(keys) for epoch in self._routes)

    def take(self, entry: Entry) -> Choice | None:
        """Claim room for a request on the best executors that have it; None when it has to wait."""
        costs = {route.epoch: self._decode_cost(entry, route) for route in self._targets}
        fit = [route for route in self._targets if self._has_room(entry, route, costs[route.epoch])]
        if not fit:
            return None
        target = fit[0] if len(self._targets) == 1 else min(fit, key=lambda route: self._score(entry, route))
        sources = self._sources_for(entry, target)
        prompt_pages = pages_for(entry.prompt_tokens, target.facts.page_tokens)
        costs |= {route.epoch: prompt_pages - self._hits_in_use(entry, route) for route in sources}
        free = [route for route in sources if route.slots and costs[route.epoch] <= route.pages]
        if sources and not free:
            return None
        source = min(free, key=lambda route: self._queue_tokens(entry, route)) if free else None
        target.take(costs[target.epoch])
        if source is not None:
            source.take(costs[source.epoch])
            source.booked_tokens += entry.prompt_tokens
        return Choice(target, source)

    def _sort(self) -> None:
        self._targets = [route for route in self._routes.values() if route.role != PREFILL]
        self._sources = [route for route in self._routes.values() if route.role == PREFILL]

    def _decode_cost(self, entry: Entry, route: Route) -> int:
        return entry.pages - self._hits_in_use(entry, route)

    def _hits_in_use(self, entry: Entry, route: Route) -> int:
        return self._unit(route.epoch).leases.in_use(entry.keys[: entry.most_hits])

    def _hits(self, entry: Entry, route: Route) -> int:
        return self._unit(route.epoch).leases.known(entry.keys[: entry.most_hits])

    def _has_room(self, entry: Entry, route: Route, cost_pages: int) -> bool:
        is_next = entry.rank < route.before and entry.most_tokens <= route.facts.context_tokens
        return is_next and route.slots > 0 and cost_pages <= route.pages

    def _score(self, entry: Entry, route: Route) -> float:
        """Best is where the least is left to do: the share of its pages that it doesn't find there, plus the load.

        So a long prefix outweighs load, a short one doesn't heap everything on one executor. A session goes where its
        pin is as long as there is room.
        """
        session = route.prefix.session(entry.submit)
        if session is not None and self._unit(route.epoch).leases.holds_session(session):
            return route.load - 1.0
        return route.load + (entry.pages - self._hits(entry, route)) / entry.pages

    def _sources_for(self, entry: Entry, target: Route) -> list[Route]:
        """Who may compute the prompt for `target`; none: it does so itself, also where nobody else is up.

        So it does where it lacks little of the prompt, where every prompt token's logprobs are wanted, which stay where
        they are computed, and where nothing is to be generated.
        """
        sampling, tokens = entry.submit.sampling, entry.prompt_tokens
        lacking = tokens - self._hits(entry, target) * target.facts.page_tokens
        is_scored = sampling.prompt_logprobs >= 0 or sampling.max_tokens == 0
        if entry.is_local or is_scored or lacking < max(1, self._least_tokens):
            return []
        return [
            route
            for route in self._sources
            if tokens <= route.facts.context_tokens
            and pages_for(tokens, route.facts.page_tokens) <= route.facts.total_pages
        ]

    def _queue_tokens(self, entry: Entry, route: Route) -> int:
        """Prompt tokens that `route` computes before this prompt is done."""
        left = entry.prompt_tokens - self._hits(entry, route) * route.facts.page_tokens
        return self._unit(route.epoch).backlog_tokens + route.booked_tokens + left
