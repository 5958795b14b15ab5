"""The kv actor: cold accounting. It counts pools when asked, and each whenever it should be empty.

Owns what the last counts said. It reads the ledgers through a census function and must not change them, nor be on any
request's path: a count is O(pages), so idle counts of a pool are at least a second apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from epicycle.actors.control_messages import PoolIdle, ToKv
from epicycle.actors.inbox import Inbox
from epicycle.kvstore.ledger import Census as PoolCensus
from epicycle.transport.wire.kv import Census, Snapshot

IDLE_CENSUS_S = 1.0
NOTHING = Census(0, 0, 0, 0, 0, 0, 0, is_idle=True, is_even=True)

_log = structlog.get_logger()


class Pool(Protocol):
    """An executor's pool. `running`: how many requests hold a slot there."""

    @property
    def name(self) -> str: ...

    @property
    def running(self) -> int: ...

    def census(self) -> PoolCensus: ...


class KvActor:
    """One inbox (`inbox`), turned by `turn`. `pools` are those of the executors that are up; `reply` takes the Census
    that a Snapshot asked for.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        pools: Callable[[], Iterable[Pool]],
        reply: Callable[[Census], None],
    ) -> None:
        self.inbox: Inbox[ToKv] = Inbox("kv")
        self.uneven_censuses = 0
        self.last_error = ""
        self._last: dict[str, Census] = {}  # by executor
        self._clock = clock
        self._pools = pools
        self._reply = reply
        self._due: set[str] = set()
        self._counted_s: dict[str, float] = {}

    def turn(self) -> None:
        for message in self.inbox.take():
            match message:
                case Snapshot(ref=ref):
                    self._reply(_sum(ref, [self._count(pool) for pool in self._pools()]))
                case PoolIdle(executor=executor):
                    self._due.add(executor)
                case _:
                    raise AssertionError(f"no handler for {type(message).__name__}")
        if self._due:
            self._count_idle()

    def last(self, executor: str) -> Census:
        """What the last count of this executor's pool said."""
        return self._last.get(executor, NOTHING)

    def _count_idle(self) -> None:
        now_s = self._clock()
        for pool in self._pools():
            if pool.name in self._due and now_s - self._counted_s.get(pool.name, float("-inf")) >= IDLE_CENSUS_S:
                self._due.discard(pool.name)
                if pool.running == 0:  # else the pool is in use again, and will be idle again
                    self._count(pool)

    def gauges(self, executor: str, free: int, total: int, prefix: int) -> dict[str, float]:
        """Pages by class for a beat. Free and prefix-only ones are exact; leased and snapshotting as last counted."""
        cold = self.last(executor)
        held = total - free
        leased, snapshotting = (min(held - prefix, pages) for pages in (cold.leased, cold.snapshotting))
        return {
            'kv_pages{state="free"}': free,
            'kv_pages{state="live"}': max(0, held - prefix - leased - snapshotting),
            'kv_pages{state="prefix"}': prefix,
            'kv_pages{state="leased"}': leased,
            'kv_pages{state="snapshotting"}': snapshotting,
            "kv_usage_ratio": (held - prefix) / total if total else 0.0,
        }

    def _count(self, pool: Pool) -> Census:
        """Count, judge and remember. An uneven count is an error of ours: it is logged, counted and shown in health."""
        counted, is_idle = pool.census(), pool.running == 0
        self._counted_s[pool.name] = self._clock()
        census = Census(
            ref=0,
            total=counted.total_pages,
            free=counted.free_pages,
            live=counted.live_pages,
            prefix=counted.prefix_only_pages,
            leased=counted.leased_pages,
            snapshotting=counted.snapshotting_pages,
            is_idle=is_idle,
            is_even=counted.is_even and not (is_idle and counted.live_pages + counted.leased_pages),
        )
        self._last[pool.name] = census
        if not census.is_even:
            self.uneven_censuses += 1
            self.last_error = f"{pool.name}: {counted.line()}; {pool.running} requests hold slots"
            _log.error("uneven_census", census=self.last_error)
        return census


def _sum(ref: int, parts: list[Census]) -> Census:
    """All pools as one."""
    return Census(
        ref=ref,
        total=sum(part.total for part in parts),
        free=sum(part.free for part in parts),
        live=sum(part.live for part in parts),
        prefix=sum(part.prefix for part in parts),
        leased=sum(part.leased for part in parts),
        snapshotting=sum(part.snapshotting for part in parts),
        is_idle=all(part.is_idle for part in parts),
        is_even=all(part.is_even for part in parts),
    )
