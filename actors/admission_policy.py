"""Who of the waiting gets in: order by aged priority, a bounded scan, and a bounded number of bypasses.

Pure functions of numbers and of who fits. It must not know requests, executors, clocks or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassLimits:
    """`scan_limit`: how far down the queue one pass looks. `max_bypasses`: how often a blocked one may be passed."""

    scan_limit: int
    max_bypasses: int


@dataclass(frozen=True, slots=True)
class PassResult:
    """`admitted`: positions in the queue, in order. `bypassed`: (position, how many passed it) for the blocked."""

    admitted: tuple[int, ...]
    bypassed: tuple[tuple[int, int], ...]


def order_key(priority: int, arrived_s: float, ageing_s: float) -> float:
    """Sort key of a waiting request: it improves by one priority for every `ageing_s` waited; 0 switches ageing off.

    Everybody ages at one rate, so the order of two requests never changes and the key can be computed once. Equal keys
    go by arrival.
    """
    return priority + arrived_s / ageing_s if ageing_s > 0 else float(priority)


def admission_pass(
    take: Callable[[int], bool], is_full: Callable[[], bool], bypasses: Sequence[int], limits: PassLimits
) -> PassResult:
    """One pass over the queue, best first. `take(i)` claims room for position i if there is some for it; `is_full`:
    nobody could get in. `bypasses[i]`: how often position i was passed.

    A request that doesn't fit is deferred in place and each later one that gets in counts as one bypass; once somebody
    has been passed `max_bypasses` times nobody gets past until it fits.
    """
    admitted: list[int] = []
    blocked: dict[int, int] = {}
    for position in range(min(len(bypasses), limits.scan_limit)):
        if is_full():
            break
        if any(bypasses[at] + passed >= limits.max_bypasses for at, passed in blocked.items()):
            break
        if not take(position):
            blocked[position] = 0
            continue
        admitted.append(position)
        for at in blocked:
            blocked[at] += 1
    return PassResult(tuple(admitted), tuple(item for item in blocked.items() if item[1]))
