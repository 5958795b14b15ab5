"""The kv actor counts when asked and when idle, and says loudly when the books don't balance."""

from __future__ import annotations

from dataclasses import dataclass

from epicycle.actors.control_messages import PoolIdle
from epicycle.actors.kv import KvActor
from epicycle.kvstore.ledger import Census as PoolCensus
from epicycle.kvstore.ledger import Ledger
from epicycle.transport.wire.kv import Census, Snapshot
from tests.fakes.clock import FakeClock


@dataclass
class Bench:
    ledger: Ledger
    running: int = 0
    name: str = "ex0"

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.replies: list[Census] = []
        self.actor = KvActor(self.clock, lambda: [self], self.replies.append)

    def census(self) -> PoolCensus:
        return self.ledger.census()

    def say(self, message: Snapshot | PoolIdle) -> None:
        self.actor.inbox.post(message)
        self.actor.turn()


def test_snapshot_is_answered_with_the_count() -> None:
    bench = Bench(Ledger(8), running=1)
    bench.ledger.claim("row", 3)
    bench.say(Snapshot(ref=5))
    assert [Census(5, 8, 5, 3, 0, 0, 0, is_idle=False, is_even=True)] == bench.replies


def test_page_left_behind_when_idle_is_an_error() -> None:
    bench = Bench(Ledger(8))
    bench.ledger.claim("forgotten", 1)
    bench.say(PoolIdle("ex0"))
    assert 1 == bench.actor.uneven_censuses
    assert "live 1" in bench.actor.last_error
    assert "0 requests hold slots" in bench.actor.last_error


def test_even_idle_pool_is_no_error() -> None:
    bench = Bench(Ledger(8))
    bench.say(PoolIdle("ex0"))
    assert (0, "") == (bench.actor.uneven_censuses, bench.actor.last_error)
    assert Census(0, 8, 8, 0, 0, 0, 0, is_idle=True, is_even=True) == bench.actor.last("ex0")


def test_idle_counts_are_a_second_apart_and_none_is_forgotten() -> None:
    bench = Bench(Ledger(8))
    bench.say(PoolIdle("ex0"))
    bench.ledger.claim("forgotten", 1)
    bench.say(PoolIdle("ex0"))
    assert 0 == bench.actor.uneven_censuses
    bench.clock.advance(1.0)
    bench.actor.turn()
    assert 1 == bench.actor.uneven_censuses


def test_pool_in_use_again_is_not_counted_as_idle() -> None:
    bench = Bench(Ledger(8), running=1)
    bench.ledger.claim("row", 1)
    bench.say(PoolIdle("ex0"))
    assert 0 == bench.actor.uneven_censuses


def test_gauges_add_up() -> None:
    bench = Bench(Ledger(8), running=1)
    bench.ledger.claim("row", 3)
    gauges = bench.actor.gauges("ex0", bench.ledger.free_pages, bench.ledger.total_pages, 1)
    assert (5, 2, 1, 0.25) == (
        gauges['kv_pages{state="free"}'],
        gauges['kv_pages{state="live"}'],
        gauges['kv_pages{state="prefix"}'],
        gauges["kv_usage_ratio"],
    )
