"""Control's own kv actor: cold accounting questions that are not on a request's path."""

from __future__ import annotations

from epicycle.transport.wire.base import Wire


class Snapshot(Wire, frozen=True, tag=70):
    """Ask for the census of the pool. `ref` comes back in the reply."""

    ref: int


class Census(Wire, frozen=True, tag=71):
    """Pages by class (leased > live > prefix-only > snapshotting > free) and their total.

    `is_idle`: no request holds a slot. `is_even`: the classes sum to the total and, when
    idle, nothing is live or leased.
    """

    ref: int
    total: int
    free: int
    live: int
    prefix: int
    leased: int
    snapshotting: int
    is_idle: bool
    is_even: bool
