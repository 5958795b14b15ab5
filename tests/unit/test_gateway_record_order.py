"""Rows of a recording in the order of arrival, without piling up behind a request that never ends."""

from __future__ import annotations

from typing import Any

from epicycle.actors.gateway.record_order import ArrivalOrder
from epicycle.actors.gateway.record_rows import Ended


def ended(rid: int) -> Ended:
    spec: Any = None
    return Ended(spec, [rid], 0.0, [[1]], ["stop"])


def leave(order: ArrivalOrder, rid: int) -> list[int]:
    return [one.rids[0] for one in order.leave(ended(rid))]


def test_whoever_ends_early_waits_for_those_that_came_before() -> None:
    order = ArrivalOrder()
    for rid in (1, 2, 3, 4):
        order.enter(rid)
    assert [[], [1, 2], [], [3, 4]] == [leave(order, rid) for rid in (2, 1, 4, 3)]


def test_too_many_waiting_pass_the_one_that_still_runs() -> None:
    order = ArrivalOrder(limit=2)
    for rid in range(6):
        order.enter(rid)
    assert [[], [], [1, 2, 3], [], [0, 4], [5]] == [leave(order, rid) for rid in (3, 1, 2, 4, 0, 5)]
