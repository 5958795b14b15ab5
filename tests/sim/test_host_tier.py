"""Cached pages that the pool gives up are kept on the host and come back by a copy. The mock checks every page."""

from __future__ import annotations

from typing import Any

import msgspec

from epicycle.actors.mock_model import MOST_SPILLS
from tests.sim.world import LOOPS, World, expected_tokens, make_config

OLD, NEW = list(range(100, 148)), list(range(200, 248))  # three pages each


def tiered(pages: int = 8, host_pages: int = 32, **config: Any) -> World:
    made = make_config(pages=pages, prefix_cache=True, **config)
    executor = msgspec.structs.replace(made.executor, mock_host_prefix_pages=host_pages)
    return World(msgspec.structs.replace(made, executor=executor))


def ask(world: World, prompt: int | list[int], max_tokens: int = 4, **fields: Any) -> int:
    """Serve one request to its end; how many of its prompt's tokens were cached."""
    rid = world.gateway.submit(prompt, max_tokens, **fields)
    assert ["length"] == world.finish(rid)
    return int(world.heard(rid).cached_tokens)


def crowd_out(world: World) -> None:
    """One request that takes the whole pool; three pages go to the host at a time."""
    ask(world, [7] * 8, 120)


def test_a_prefix_that_was_given_up_comes_back_from_the_host() -> None:
    world = tiered()
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    assert 0 == world.counter('kv_pages{state="prefix"}')
    assert 3 == world.counter("prefix_spilled_pages_total") == world.counter('host_pages{state="prefix"}')
    before = world.counter('core_row_loops_total{kind="prompt"}')
    assert 48 == ask(world, [*OLD, 1], 2)
    assert LOOPS == world.counter('core_row_loops_total{kind="prompt"}') - before
    assert 48 == world.counter("prefix_host_hit_tokens_total") == world.counter("prefix_hit_tokens_total")
    assert 48 == ask(world, [*OLD, 2], 2)  # it is in the pool again
    assert 48 == world.counter("prefix_host_hit_tokens_total")
    world.assert_empty()


def test_the_pool_has_the_beginning_and_the_host_the_rest() -> None:
    world = tiered(pages=9)
    ask(world, [*OLD, *NEW, 1], 2)  # six full pages
    ask(world, [7] * 8, 16 * 6 - 7)  # takes the last three of them
    assert 3 == world.counter('kv_pages{state="prefix"}') == world.counter('host_pages{state="prefix"}')
    assert 96 == ask(world, [*OLD, *NEW, 1], 2)
    assert 48 == world.counter("prefix_host_hit_tokens_total")
    world.assert_empty()


def test_no_more_are_spilled_at_once_than_the_executor_stages() -> None:
    world = tiered()
    ask(world, [*OLD, *NEW, 1], 2)  # six pages
    crowd_out(world)
    spilled = world.counter("prefix_spilled_pages_total")
    assert MOST_SPILLS <= spilled <= 6


def test_a_small_host_keeps_the_latest() -> None:
    world = tiered(host_pages=3)
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    ask(world, [*NEW, 1], 2)
    crowd_out(world)
    assert 48 == ask(world, [*NEW, 1], 2)
    crowd_out(world)
    assert 0 == ask(world, [*OLD, 1], 2)


def test_a_reset_empties_the_host_too() -> None:
    world = tiered()
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    world.gateway.reset_cache(1)
    world.step(3)
    assert 0 == world.counter('host_pages{state="prefix"}')
    assert 0 == ask(world, [*OLD, 1], 2)


def test_a_request_that_is_cancelled_while_its_pages_arrive_leaves_nothing() -> None:
    world = tiered()
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    rid = world.gateway.submit([*OLD, 1], 40)
    world.step(1)
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    assert 48 == ask(world, [*OLD, 1], 2)
    world.assert_empty()


def test_a_full_plan_link_changes_nothing() -> None:
    world = tiered()
    ask(world, [*OLD, 1], 2)
    assert world.executor_host is not None
    world.fabric.blocked.add(world.executor_host.endpoints[0].address)
    rids = [world.gateway.submit(8, 120), world.gateway.submit([*OLD, 1], 2)]
    world.step(5)
    world.gateway.cancel(rids[0])
    world.step(2)
    world.fabric.blocked.clear()
    world.finish(*rids)
    again = world.gateway.submit(48, 30)
    world.finish(again)
    assert expected_tokens(48, 30) == world.heard(again).tokens
    world.assert_empty()


def test_a_new_control_and_a_new_executor_begin_with_nothing_there() -> None:
    world = tiered()
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    world.restart_control()
    assert 0 == ask(world, [*OLD, 1], 2)
    crowd_out(world)
    assert 48 == ask(world, [*OLD, 1], 2)
    world.kill_executor()
    world.start_executor(2)
    assert 0 == ask(world, [*OLD, 1], 2)
    world.assert_empty()


def test_it_is_off_unless_asked_for() -> None:
    world = World(make_config(pages=8, prefix_cache=True))
    ask(world, [*OLD, 1], 2)
    crowd_out(world)
    assert (0, 0) == (world.counter("prefix_spilled_pages_total"), ask(world, [*OLD, 1], 2))
