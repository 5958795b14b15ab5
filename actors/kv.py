"""The kv actor: cold accounting. It counts the pool when asked and whenever the pool should be empty.

Owns what the last count said. It reads the ledger through a census function and must not change it, nor be on any
request's path: a count is O(pages), so idle counts are at least a second apart.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from epicycle.actors.control_messages import PoolIdle, ToKv
from epicycle.actors.inbox import Inbox
from epicycle.kvstore.ledger import Census as PoolCensus
from epicycle.transport.wire.kv import Census, Snapshot

IDLE_CENSUS_S = 1.0

_log = structlog.get_logger()


class KvActor:
    """One inbox (`inbox`), turned by `turn`. `count` is the ledger's census, None while there is no pool.

    `running` says how many requests hold a slot; `reply` takes the Census a Snapshot asked for.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        count: Callable[[], PoolCensus | None],
        running: Callable[[], int],
        reply: Callable[[Census], None],
    ) -> None:
        self.inbox: Inbox[ToKv] = Inbox("kv")
        self.uneven_censuses = 0
        self.last_error = ""
        self.last = Census(0, 0, 0, 0, 0, 0, 0, is_idle=True, is_even=True)
        self._clock = clock
        self._count = count
        self._running = running
        self._reply = reply
        self._is_due = False
        self._counted_s = float("-inf")

    def turn(self) -> None:
        for message in self.inbox.take():
            match message:
                case Snapshot(ref=ref):
                    self._reply(self._census(ref))
                case PoolIdle():
                    self._is_due = True
                case _:
                    raise AssertionError(f"no handler for {type(message).__name__}")
        if self._is_due and self._clock() - self._counted_s >= IDLE_CENSUS_S:
            self._is_due = False
            if self._running() == 0:  # else the pool is in use again, and will be idle again
                self._census(0)

    def gauges(self, free: int, total: int, prefix: int) -> dict[str, float]:
        """Pages by class for a beat. Free and prefix-only ones are exact; leased and snapshotting as last counted."""
        cold = self.last
        held = total - free
        leased, snapshotting = (min(held - prefix, pages) for pages in (cold.leased, cold.snapshotting))
        return {
            'kv_pages{state="free"}': free,
            'kv_pages{state="live"}': max(0, held - prefix - leased - snapshotting),
            'kv_pages{state="prefix"}': prefix,
            'kv_pages{state="leased"}': leased,
            'kv_pages{state="snapshotting"}': snapshotting,
            "kv_usage_ratio": (held - prefix) / total if total else 0.0,
            "uneven_census_total": self.uneven_censuses,
        }

    def _census(self, ref: int) -> Census:
        """Count, judge and remember. An uneven count is an error of ours: it is logged, counted and shown in health."""
        pool = self._count()
        if pool is None:
            return Census(ref, 0, 0, 0, 0, 0, 0, is_idle=True, is_even=True)
        is_idle = self._running() == 0
        self._counted_s = self._clock()
        self.last = Census(
            ref=ref,
            total=pool.total_pages,
            free=pool.free_pages,
            live=pool.live_pages,
            prefix=pool.prefix_only_pages,
            leased=pool.leased_pages,
            snapshotting=pool.snapshotting_pages,
            is_idle=is_idle,
            is_even=pool.is_even and not (is_idle and pool.live_pages + pool.leased_pages),
        )
        if not self.last.is_even:
            self.uneven_censuses += 1
            self.last_error = f"{pool.line()}; {self._running()} requests hold slots"
            _log.error("uneven_census", census=self.last_error)
        return self.last
