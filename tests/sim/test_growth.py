"""Incremental leases: growth in time; where nobody can be saved one row yields when the pool is dry; nobody hangs."""

from __future__ import annotations

from epicycle.transport.wire.output import POOL_WARNING
from tests.sim.world import World, expected_tokens, make_config


def incremental(pages: int, *, slots: int = 4, low: int = 4, step: int = 16) -> World:
    return World(make_config(pages=pages, slots=slots, preemption=False, low_water_tokens=low, grow_tokens=step))


def test_lifetime_reservation_holds_everything_from_the_start() -> None:
    world = World(make_config(pages=32, reservation="lifetime"))
    world.gateway.submit(prompt=16, max_tokens=49)
    world.step(2)
    assert (28, 4) == (world.counter('kv_pages{state="free"}'), world.counter('kv_pages{state="live"}'))


def test_incremental_lease_grows_with_its_row_and_never_starves() -> None:
    world = incremental(pages=32)
    rid = world.gateway.submit(prompt=16, max_tokens=200)
    world.step(2)
    held = [world.counter('kv_pages{state="live"}')]
    while not world.heard(rid).terminals:
        world.step()
        if world.counter('kv_pages{state="live"}') != held[-1]:
            held.append(world.counter('kv_pages{state="live"}'))
    # 16 + 4 + 16 positions at first, then 4 + 16 past what is written, 215 in the end.
    assert [3, 5, 7, 9, 11, 13, 14] == [int(pages) for pages in held if pages]
    assert expected_tokens(16, 200) == world.heard(rid).tokens
    assert "" == world.heard(rid).terminals[0].warning
    assert 0 == world.counter('starved_total{kind="latency"}')
    world.assert_empty()


def test_growth_equals_reservation_in_every_token() -> None:
    tokens = []
    for world in (World(make_config(pages=64, reservation="lifetime")), incremental(pages=64)):
        rids = [world.gateway.submit(prompt=10 + n, max_tokens=90) for n in range(3)]
        world.finish(*rids)
        tokens.append([world.heard(rid).tokens for rid in rids])
    assert tokens[0] == tokens[1]


def test_without_preemption_the_youngest_of_three_that_need_28_pages_yields_in_24() -> None:
    world = incremental(pages=24)
    needs = (9, 9, 10)
    rids = [world.gateway.submit(prompt=32, max_tokens=16 * pages - 31) for pages in needs]
    assert ["length"] * 3 == world.finish(*rids)
    lengths = [len(world.heard(rid).tokens) for rid in rids]
    assert [16 * 9 - 31] * 2 == lengths[:2]
    assert 0 < lengths[2] < 16 * 10 - 31  # the youngest yielded
    assert [expected_tokens(32, length) for length in lengths] == [world.heard(rid).tokens for rid in rids]
    assert ["", "", POOL_WARNING] == [world.heard(rid).terminals[0].warning for rid in rids]
    assert (1, 1) == (world.counter("yielded_rows_total"), world.counter('starved_total{kind="pool"}'))
    assert 0 == world.counter('starved_total{kind="latency"}')
    world.assert_empty()


def test_many_rows_in_a_tiny_pool_all_end_and_the_oldest_is_whole() -> None:
    world = incremental(pages=12, slots=8, low=2, step=4)
    rids = [world.gateway.submit(prompt=8, max_tokens=150) for _ in range(8)]
    assert ["length"] * 8 == world.finish(*rids)
    assert 150 == len(world.heard(rids[0]).tokens)
    world.assert_empty()


def test_newcomers_wait_while_running_rows_are_owed_growth() -> None:
    world = incremental(pages=8, low=4, step=16)
    first = world.gateway.submit(prompt=32, max_tokens=80)  # 7 pages in the end
    world.step(2)
    second = world.gateway.submit(prompt=64, max_tokens=30)  # 6 pages now
    world.step(20)
    assert [] == world.heard(second).tokens
    assert ["length", "length"] == world.finish(first, second)
    assert 80 == len(world.heard(first).tokens)
    assert 0 == world.counter("yielded_rows_total")


def test_late_growth_is_counted_as_starved_by_latency() -> None:
    world = incremental(pages=32, low=2, step=16)
    assert world.executor_host is not None
    rid = world.gateway.submit(prompt=16, max_tokens=60)
    world.step(8)
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    world.step(60)
    stalled = len(world.heard(rid).tokens)
    assert 1 == world.counter('starved_total{kind="latency"}')
    world.step(20)
    assert stalled == len(world.heard(rid).tokens)
    world.fabric.blocked.clear()
    assert ["length"] == world.finish(rid)
    assert expected_tokens(16, 60) == world.heard(rid).tokens
    assert 0 == world.counter('starved_total{kind="pool"}')
    world.assert_empty()


def test_cancelled_row_gives_its_pages_to_those_that_wait_for_growth() -> None:
    world = incremental(pages=24)
    rids = [world.gateway.submit(prompt=32, max_tokens=16 * pages - 31) for pages in (9, 9, 10)]
    world.run_until(lambda: world.counter('kv_pages{state="free"}') <= 2)
    world.gateway.cancel(rids[0])
    assert ["cancelled", "length", "length"] == world.finish(*rids)
    assert 16 * 9 - 31 == len(world.heard(rids[1]).tokens)
    world.assert_empty()
