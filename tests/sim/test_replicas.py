"""Several executors behind one admission: where requests go, and what the death of one costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.sim.world import World, expected_tokens, make_config

PAGE = 16


def make_world(replicas: int = 2, **config: Any) -> World:
    return World(make_config(replicas=replicas, **config))


def home(world: World, rid: int) -> int:
    """The epoch of the executor that the request was told of; executors of a new world are 1, 2, ..."""
    return world.heard(rid).executor_epoch


def prompt(seed: int, tokens: int) -> list[int]:
    return [10 + (seed * 131 + at) % 4000 for at in range(tokens)]


def test_requests_spread_by_load() -> None:
    world = make_world(replicas=3, slots=4)
    rids = [world.gateway.submit(prompt(seed, 20), max_tokens=40) for seed in range(9)]
    world.step(4)
    assert Counter({1: 3, 2: 3, 3: 3}) == Counter(home(world, rid) for rid in rids)
    assert ["length"] * 9 == world.finish(*rids)
    world.assert_empty()


def test_all_slots_of_all_executors_are_used() -> None:
    world = make_world(slots=2)
    rids = [world.gateway.submit(max_tokens=100 + at) for at in range(5)]
    world.step(4)
    assert (4, 1) == (world.control.scheduler.running, world.control.admission.waiting)
    assert ["length"] * 5 == world.finish(*rids)


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    world = make_world(prefix_cache=True, pages=256)
    first, other = (world.gateway.submit(prompt(seed, 6 * PAGE), max_tokens=4) for seed in (1, 2))
    world.finish(first, other)
    assert {1, 2} == {home(world, first), home(world, other)}
    busy = world.gateway.submit([*prompt(1, 6 * PAGE), 7], max_tokens=100)
    again = world.gateway.submit([*prompt(1, 6 * PAGE), 8], max_tokens=4)
    world.finish(again)
    assert [home(world, first)] * 2 == [home(world, busy), home(world, again)]
    assert 6 * PAGE == world.heard(again).cached_tokens
    world.finish(busy)
    world.assert_empty()


def test_a_short_common_beginning_does_not_heap_everybody_on_one_executor() -> None:
    world = make_world(prefix_cache=True, pages=256, slots=8)
    world.finish(world.gateway.submit(prompt(1, PAGE + 1), max_tokens=1))
    rids = [world.gateway.submit(prompt(1, PAGE) + prompt(seed, 8 * PAGE), max_tokens=60) for seed in range(2, 10)]
    world.step(4)
    assert 2 == len({home(world, rid) for rid in rids})


def test_a_prefix_elsewhere_is_no_reason_to_wait() -> None:
    world = make_world(prefix_cache=True, pages=256, slots=1)
    first = world.gateway.submit(prompt(1, 4 * PAGE), max_tokens=2)
    world.finish(first)
    running = world.gateway.submit([*prompt(1, 4 * PAGE), 7], max_tokens=200)
    world.step(4)
    late = world.gateway.submit([*prompt(1, 4 * PAGE), 8], max_tokens=2)
    world.finish(late)
    assert home(world, running) == home(world, first) != home(world, late)


def test_a_session_stays_with_the_executor_that_pins_its_prompt() -> None:
    world = make_world(prefix_cache=True, pages=256, slots=4)
    first = world.gateway.submit(prompt(1, 2 * PAGE), max_tokens=2, session_id="s")
    world.finish(first)
    here = home(world, first)
    load = [world.gateway.submit(prompt(seed, 2 * PAGE), max_tokens=300) for seed in (5, 6, 7)]
    world.step(4)
    turn = world.gateway.submit(prompt(1, 2 * PAGE) + prompt(9, 8 * PAGE), max_tokens=2, session_id="s")
    world.finish(turn)
    assert here == home(world, turn)
    for rid in load:
        world.gateway.cancel(rid)
    world.finish(*load)
    world.assert_empty()


def test_a_dead_executor_costs_its_own_requests_only() -> None:
    world = make_world(slots=2)
    rids = [world.gateway.submit(prompt=3 + at, max_tokens=40) for at in range(6)]  # two on each, two wait
    world.step(8)
    lost = [rid for rid in rids if home(world, rid) == 1]
    world.kill_executor("ex0")
    ends = dict(zip(rids, world.finish(*rids), strict=True))
    assert 2 == len(lost)
    assert {rid: "engine_lost" if rid in lost else "length" for rid in rids} == ends
    for at, rid in enumerate(rids):
        if rid not in lost:
            assert expected_tokens(3 + at, 40) == world.heard(rid).tokens
    world.assert_empty()


def test_a_request_on_its_way_to_a_dead_executor_ends_once() -> None:
    world = make_world(slots=2)
    world.fabric.blocked.add(world.executor_hosts["ex0"].endpoints[0].address)
    rids = [world.gateway.submit(max_tokens=4) for _ in range(4)]
    world.step(3)
    world.kill_executor("ex0")
    assert Counter({"engine_lost": 2, "length": 2}) == Counter(world.finish(*rids))
    world.assert_empty()


def test_an_executor_that_comes_back_serves_again() -> None:
    world = make_world(slots=1)
    world.kill_executor("ex1")
    world.start_executor(3, "ex1")
    rids = [world.gateway.submit(max_tokens=30) for _ in range(2)]
    world.step(4)
    assert {1, 3} == {home(world, rid) for rid in rids}
    assert ["length"] * 2 == world.finish(*rids)


def test_without_any_executor_nobody_waits() -> None:
    world = make_world(slots=1)
    rids = [world.gateway.submit(max_tokens=50) for _ in range(3)]
    world.step(4)
    world.kill_executor("ex0")
    world.kill_executor("ex1")
    assert ["engine_lost"] * 3 == world.finish(*rids)
    assert ["not_ready"] == world.finish(world.gateway.submit())


def test_a_request_that_fits_no_pool_is_refused_with_the_limits() -> None:
    world = make_world(pages=8)
    rid = world.gateway.submit(prompt=100, max_tokens=100)
    assert ["context_length_exceeded"] == world.finish(rid)
    assert "the context is 128 tokens (engine.context_tokens)" in world.heard(rid).terminals[0].message


def test_drain_waits_for_all_executors() -> None:
    world = make_world(slots=1)
    rids = [world.gateway.submit(max_tokens=20 + 20 * at) for at in range(2)]
    world.step(4)
    world.drain(deadline_ms=10_000)
    world.finish(rids[0])
    assert not world.control_host.is_drained
    world.finish(rids[1])
    assert world.control_host.is_drained


def test_series_of_several_executors_say_whose_they_are() -> None:
    world = make_world()
    rids = [world.gateway.submit(max_tokens=4) for _ in range(2)]
    world.finish(*rids)
    world.assert_empty()
    for name in ("ex0", "ex1"):
        assert 4 == world.counter(f'generation_tokens_total{{executor="{name}"}}')
        assert 64 == world.counter(f'kv_pages{{executor="{name}",state="free"}}')
    assert "ticks_total" not in world.control.beat_facts().counters


def test_an_executor_that_is_not_up_yet_has_its_series() -> None:
    world = World(make_config(replicas=2), executor=False)
    world.start_executor(1, "ex1")
    assert 0 == world.counter('generation_tokens_total{executor="ex0"}')
    assert [0, 64] == [world.counter(f'kv_pages{{executor="{name}",state="free"}}') for name in ("ex0", "ex1")]


def test_counters_of_an_executor_outlive_it() -> None:
    world = make_world()
    world.finish(world.gateway.submit(max_tokens=4))
    world.kill_executor("ex0")
    assert 4 == world.counter('generation_tokens_total{executor="ex0"}')
    assert 0 == world.counter('requests_running{executor="ex0"}')


def test_reset_of_the_cache_reaches_every_executor() -> None:
    world = make_world(prefix_cache=True)
    rids = [world.gateway.submit(prompt(seed, 2 * PAGE), max_tokens=2) for seed in (1, 2)]
    world.finish(*rids)
    world.gateway.reset_cache(ref=5)
    world.step(2)
    assert [(5, 4)] == [(reset.ref, reset.freed_pages) for reset in world.gateway.resets]


def test_a_restarted_control_resets_every_executor() -> None:
    world = make_world(slots=2)
    for _ in range(4):
        world.gateway.submit(max_tokens=300)
    world.step(8)
    world.restart_control()
    rids = [world.gateway.submit(prompt=5 + at, max_tokens=6) for at in range(4)]
    assert ["length"] * 4 == world.finish(*rids)
    assert [expected_tokens(5 + at, 6) for at in range(4)] == [world.heard(rid).tokens for rid in rids]
    assert 0 == world.counter('stale_messages_total{actor="control"}')
    world.assert_empty()
