"""A cancel at any moment: exactly one terminal, and nothing stays behind."""

from __future__ import annotations

import pytest

from epicycle.transport.wire.output import Fin
from epicycle.transport.wire.request import Rejected
from tests.sim.world import World, make_config


def test_cancel_while_waiting() -> None:
    world = World(make_config(slots=1))
    running = world.gateway.submit(max_tokens=30)
    waiting = world.gateway.submit()
    world.step(2)
    world.gateway.cancel(waiting)
    assert ["cancelled", "length"] == world.finish(waiting, running)
    assert isinstance(world.heard(waiting).terminals[0], Rejected)
    assert 0 == world.heard(waiting).accepted
    world.assert_empty()


def test_cancel_before_its_submit_arrives() -> None:
    world = World()
    rid = world.gateway.submit()
    world.gateway.cancel(rid)
    submits, cancels, _ = (receiver.drain() for receiver in world.control.receivers)
    world.control.take_requests(cancels)  # type: ignore[arg-type]
    world.control.take_requests(submits)  # type: ignore[arg-type]
    assert ["cancelled"] == world.finish(rid)
    assert [] == world.heard(rid).tokens
    world.assert_empty()


def test_cancel_while_the_join_is_unsent() -> None:
    world = World()
    assert world.executor_host is not None
    plan_link = world.executor_host.endpoints[0].address
    world.fabric.blocked.add(plan_link)
    rid = world.gateway.submit()
    world.step(2)
    world.gateway.cancel(rid)
    world.step(2)
    world.fabric.blocked.clear()
    assert ["cancelled"] == world.finish(rid)
    assert (0, []) == (world.heard(rid).accepted, world.heard(rid).tokens)
    world.assert_empty()


def test_cancel_while_the_join_is_on_its_way() -> None:
    world = World()
    rid = world.gateway.submit()
    world.step_control()  # the plan is sent, the executor has not read it
    world.gateway.cancel(rid)
    world.step_control()
    assert ["cancelled"] == world.finish(rid)
    assert isinstance(world.heard(rid).terminals[0], Fin)
    world.assert_empty()


def test_cancel_while_prefilling() -> None:
    world = World(make_config(chunk_tokens=16))
    rid = world.gateway.submit(prompt=64)
    world.step(3)
    assert [] == world.heard(rid).tokens
    assert 1 == world.counter('requests_waiting{reason="prefill"}')
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    assert 0 == world.counter('requests_waiting{reason="prefill"}')
    world.assert_empty()


def test_cancel_while_decoding() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=100)
    world.run_until(lambda: len(world.heard(rid).tokens) >= 3)
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    world.assert_empty()


@pytest.mark.parametrize("steps_before", range(6, 14))
def test_cancel_around_the_last_token(steps_before: int) -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=4)
    world.step(steps_before)
    world.gateway.cancel(rid)
    world.step_control()
    [end] = world.finish(rid)
    assert end in ("length", "cancelled")
    assert (4 if end == "length" else len(world.heard(rid).tokens)) == len(world.heard(rid).tokens)
    world.assert_empty()


def test_cancel_twice_and_of_strangers_is_harmless() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=30)
    world.step(8)
    for stranger in (rid, rid, 12345):
        world.gateway.cancel(stranger)
    assert ["cancelled"] == world.finish(rid)
    assert ["length"] == world.finish(world.gateway.submit())
    world.assert_empty()


def test_shutdown_cancel_keeps_its_reason() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=30)
    world.step(8)
    world.gateway.cancel(rid, cause="shutdown")
    assert ["shutdown"] == world.finish(rid)


def test_slots_and_pages_are_reused_only_after_the_executor_freed_them() -> None:
    world = World(make_config(slots=1, pages=4))
    first = world.gateway.submit(prompt=16, max_tokens=40)
    world.step(8)
    second = world.gateway.submit(prompt=16, max_tokens=40)
    world.gateway.cancel(first)
    world.step_control()
    assert 1 == world.counter("requests_running")
    assert 1 == world.counter('requests_waiting{reason="capacity"}')
    assert ["cancelled", "length"] == world.finish(first, second)
    assert 0 == world.counter('stale_messages_total{actor="pump"}')
    world.assert_empty()
