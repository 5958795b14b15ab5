"""Where the pool or the slots run out, rows of low rank are saved on the host and go on later, as if nothing were."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epicycle.transport.wire.output import POOL_WARNING
from epicycle.transport.wire.plan import Evict
from tests.sim.world import World, expected_tokens, make_config

NEEDS = (9, 9, 10)  # pages, of 24


def crowded(pages: int = 24, *, slots: int = 4, host_pages: int = 64, **scheduler: Any) -> World:
    defaults = {"low_water_tokens": 4, "grow_tokens": 16}
    config = make_config(pages=pages, slots=slots, **(defaults | scheduler))
    executor = msgspec.structs.replace(config.executor, mock_host_pages=host_pages)
    return World(msgspec.structs.replace(config, executor=executor))


def life(pages: int, prompt: int = 32) -> int:
    """max_tokens of a request that needs so many pages."""
    return 16 * pages - prompt + 1


def submit_three(world: World) -> list[int]:
    return [world.gateway.submit(prompt=32, max_tokens=life(pages)) for pages in NEEDS]


def saved(world: World) -> int:
    return int(world.counter('requests_waiting{reason="preempted"}'))


def assert_whole(world: World, rids: list[int], prompt: int = 32) -> None:
    """Not a token lost or said twice, and nobody was cut short."""
    for rid in rids:
        assert expected_tokens(prompt, len(world.heard(rid).tokens)) == world.heard(rid).tokens
        assert "" == world.heard(rid).terminals[0].warning


def test_three_requests_that_need_28_pages_finish_in_24() -> None:
    world = crowded()
    rids = submit_three(world)
    assert ["length"] * 3 == world.finish(*rids)
    assert [life(pages) for pages in NEEDS] == [len(world.heard(rid).tokens) for rid in rids]
    assert_whole(world, rids)
    assert 1 <= world.counter("preemptions_total") == world.counter("resumes_total")
    assert (0, 0) == (world.counter("yielded_rows_total"), world.counter('starved_total{kind="pool"}'))
    assert [1, 1, 1] == [world.heard(rid).accepted for rid in rids]
    world.assert_empty()


def test_the_youngest_leaves_and_the_oldest_never_waits() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    stalled = len(world.heard(rids[2]).tokens)
    world.step(10)
    assert stalled == len(world.heard(rids[2]).tokens)
    assert ["length"] * 3 == world.finish(*rids)
    world.assert_empty()


def test_many_rows_in_a_tiny_pool_all_end_whole() -> None:
    world = crowded(pages=12, slots=8, low_water_tokens=2, grow_tokens=4)
    rids = [world.gateway.submit(prompt=8, max_tokens=150) for _ in range(8)]
    assert ["length"] * 8 == world.finish(*rids)
    assert_whole(world, rids, 8)
    assert [150] * 8 == [len(world.heard(rid).tokens) for rid in rids]
    assert world.counter("preemptions_total") > 3
    world.assert_empty()


@pytest.mark.parametrize(("pages", "slots"), [(24, 4), (64, 2)], ids=["pages", "slots"])
def test_an_arrival_of_high_priority_takes_the_place_of_low_ones_and_finishes_first(pages: int, slots: int) -> None:
    world = crowded(pages=pages, slots=slots)
    low = [world.gateway.submit(prompt=32, max_tokens=life(22), priority=5) for _ in range(2)]
    world.run_until(lambda: len(world.heard(low[1]).tokens) > 100)
    high = world.gateway.submit(prompt=128, max_tokens=life(14, 128), priority=0)
    assert ["length"] == world.finish(high)
    assert ["", ""] == [world.heard(rid).end for rid in low]
    assert 1 <= world.counter("preemptions_total")
    assert ["length", "length"] == world.finish(*low)
    assert_whole(world, low)
    assert_whole(world, [high], 128)
    world.assert_empty()


def test_an_arrival_of_equal_priority_waits() -> None:
    world = crowded()
    first = [world.gateway.submit(prompt=32, max_tokens=life(12)) for _ in range(2)]
    world.run_until(lambda: len(world.heard(first[1]).tokens) > 100)
    world.gateway.submit(prompt=128, max_tokens=life(9, 128))
    world.step(20)
    assert 0 == world.counter("preemptions_total")
    assert ["length", "length"] == world.finish(*first)


def test_an_arrival_that_would_not_fit_all_the_same_takes_nobody_s_place() -> None:
    world = crowded()
    high = world.gateway.submit(prompt=32, max_tokens=life(12), priority=0)
    low = world.gateway.submit(prompt=32, max_tokens=life(8), priority=9)
    world.run_until(lambda: len(world.heard(high).tokens) > 150)
    world.gateway.submit(prompt=300, max_tokens=4, priority=1)
    world.step(20)
    assert 0 == world.counter("preemptions_total")
    assert ["length", "length"] == world.finish(high, low)


def test_a_low_priority_ages_and_is_not_passed_for_ever() -> None:
    """Newcomers of a higher priority keep coming; after ten seconds a priority of one less has made up for it."""
    world = crowded(pages=12, slots=2, ageing_s=10.0)
    low = world.gateway.submit(prompt=16, max_tokens=life(10, 16), priority=1)
    world.step(20)
    newcomers = []
    for _ in range(400):
        if world.heard(low).terminals:
            break
        newcomers.append(world.gateway.submit(prompt=100, max_tokens=40, priority=0))
        world.clock.advance(0.25)
        world.step(12)
    assert "length" == world.heard(low).end
    assert world.counter("preemptions_total") >= 1
    assert_whole(world, [low], 16)
    world.run_until(lambda: all(world.heard(rid).terminals for rid in newcomers), 20_000)
    assert {"length"} == set(world.finish(*newcomers))
    world.assert_empty()


@pytest.mark.parametrize("when", ["leaving", "saved", "coming"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "gateway"])
def test_a_request_that_ends_while_it_is_away_ends_once_and_leaves_nothing(when: str, how: str) -> None:
    world = crowded()
    rids = submit_three(world)
    if how == "deadline":
        world.gateway.cancel(rids[2])
        world.finish(rids[2])
        rids[2] = world.gateway.submit(prompt=32, max_tokens=life(10), deadline_ms=5_000)
    [unit] = world.control.scheduler.units
    preemption = unit.preemption
    world.run_until(lambda: bool(preemption._leaving))
    if when != "leaving":
        world.run_until(lambda: saved(world) == 1)
    if when == "coming":
        world.run_until(lambda: saved(world) == 0 and not preemption._leaving)
    if how == "cancel":
        world.gateway.cancel(rids[2])
    elif how == "deadline":
        world.clock.advance(6)
    else:
        world.kill_gateway(0)
        world.step(200)
        world.assert_empty()
        assert (64, 64) == preemption.host_pages
        return
    expected = {"cancel": "cancelled", "deadline": "deadline"}[how]
    assert ["length", "length", expected] == world.finish(*rids)
    assert expected_tokens(32, len(world.heard(rids[2]).tokens)) == world.heard(rids[2]).tokens
    assert (64, 64) == preemption.host_pages
    world.assert_empty()


def test_an_executor_that_dies_takes_saved_requests_with_it() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    world.kill_executor()
    world.step(5)
    assert ["engine_lost"] * 3 == [world.heard(rid).end for rid in rids]
    world.start_executor(2)
    again = submit_three(world)
    assert ["length"] * 3 == world.finish(*again)
    world.assert_empty()


def test_a_new_control_begins_with_nobody_saved() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    world.restart_control()
    for heard in (world.heard(rid) for rid in rids):
        heard.terminals.append(None)  # the gateway ends them itself
    again = submit_three(world)
    assert ["length"] * 3 == world.finish(*again)
    world.assert_empty()


def test_a_drain_lets_saved_requests_finish() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    world.drain(60_000)
    assert ["length"] * 3 == world.finish(*rids)
    assert_whole(world, rids)
    world.step(3)
    assert world.control_host.is_drained


def test_a_drain_that_takes_too_long_ends_saved_requests_too() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    world.drain(1_000)
    world.clock.advance(2)
    assert ["shutdown"] * 3 == world.finish(*rids)
    world.assert_empty()


@pytest.mark.parametrize("host_pages", [0, 3])
def test_without_room_on_the_host_the_youngest_ends_early_and_says_so(host_pages: int) -> None:
    world = crowded(host_pages=host_pages)
    rids = submit_three(world)
    assert ["length"] * 3 == world.finish(*rids)
    assert ["", "", POOL_WARNING] == [world.heard(rid).terminals[0].warning for rid in rids]
    assert "host_kv_bytes" in POOL_WARNING
    assert (0, 1) == (world.counter("preemptions_total"), world.counter("preemption_refusals_total"))
    world.assert_empty()


def test_who_fits_on_the_host_is_saved_where_the_lowest_does_not() -> None:
    world = crowded(pages=24, host_pages=8)
    small = world.gateway.submit(prompt=16, max_tokens=life(10, 16))
    world.step(2)
    first = world.gateway.submit(prompt=32, max_tokens=life(12))
    world.step(2)
    large = world.gateway.submit(prompt=160, max_tokens=life(16, 160))  # the lowest, and more than the host holds
    assert ["length"] * 3 == world.finish(small, first, large)
    assert [0, 0] == [world.counter("yielded_rows_total"), world.counter("preemption_refusals_total")]
    assert world.counter("preemptions_total") >= 1
    assert_whole(world, [first])
    assert_whole(world, [small], 16)
    assert_whole(world, [large], 160)
    world.assert_empty()


def test_pages_of_prompts_that_are_still_cached_are_attached_again() -> None:
    world = crowded(prefix_cache=True)
    rids = [world.gateway.submit(prompt=48, max_tokens=life(pages + 2, 48)) for pages in NEEDS]
    [unit] = world.control.scheduler.units
    sent = []
    resume = unit.plans.resume
    unit.plans.resume = lambda message: (sent.append(message), resume(message))  # type: ignore[method-assign, assignment, func-returns-value]
    assert ["length"] * 3 == world.finish(*rids)
    assert_whole(world, rids, 48)
    assert [3] == [message.attached_pages for message in sent]
    world.assert_empty()


def test_a_plan_link_that_is_full_for_a_while_loses_nobody() -> None:
    world = crowded()
    rids = submit_three(world)
    [unit] = world.control.scheduler.units
    world.run_until(lambda: unit.leases.free_pages <= 1)
    assert world.executor_host is not None
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    world.step(80)
    world.fabric.blocked.clear()
    assert ["length"] * 3 == world.finish(*rids)
    assert_whole(world, rids)
    world.assert_empty()


def test_a_resume_that_was_not_sent_yet_can_be_cancelled() -> None:
    world = crowded()
    rids = submit_three(world)
    world.run_until(lambda: saved(world) == 1)
    assert world.executor_host is not None
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    world.gateway.cancel(rids[0])
    world.gateway.cancel(rids[1])
    world.step(3)
    world.fabric.blocked.clear()
    world.step_control()  # both are told to go
    world.step_executor()
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    world.run_until(lambda: saved(world) == 0)
    world.gateway.cancel(rids[2])
    world.step(3)
    world.fabric.blocked.clear()
    assert ["cancelled"] * 3 == world.finish(*rids)
    world.assert_empty()


def test_a_pending_preemption_gives_way_to_a_cancel() -> None:
    """The executor never hears of the first where both wait for the link."""
    world = crowded()
    rids = submit_three(world)
    [unit] = world.control.scheduler.units
    assert world.executor_host is not None
    world.run_until(lambda: unit.leases.free_pages <= 1)
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    world.run_until(lambda: bool(unit.preemption._leaving))
    world.gateway.cancel(rids[2])
    world.step(2)
    evicts = list(unit.plans._evicts.values())
    assert [Evict(evicts[0].slot, evicts[0].gen, "cancelled")] == evicts
    world.fabric.blocked.clear()
    assert ["length", "length", "cancelled"] == world.finish(*rids)
    world.assert_empty()


def test_host_pages_are_counted_like_those_of_the_device() -> None:
    world = crowded()
    rids = submit_three(world)
    [unit] = world.control.scheduler.units
    world.run_until(lambda: bool(unit.preemption._leaving))
    assert world.control.snapshot().snapshotting > 0
    world.run_until(lambda: saved(world) == 1)
    census = unit.preemption.host_census()
    assert census.is_even
    tokens = 32 + len(world.heard(rids[2]).tokens) - 1
    assert (-(-tokens // 16), 64) == (census.saved_pages, census.total_pages)
