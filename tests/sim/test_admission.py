"""Who gets in, in which order, and what the others are told."""

from __future__ import annotations

import msgspec

from epicycle.transport.wire.output import Fin
from epicycle.transport.wire.request import Rejected
from tests.sim.world import World, expected_tokens, make_config


def refusal(world: World, rid: int) -> Rejected:
    world.finish(rid)
    terminal = world.heard(rid).terminals[0]
    assert isinstance(terminal, Rejected)
    return terminal


def first_token_order(world: World, rids: list[int]) -> list[int]:
    """Positions in `rids`, by when their first token came."""
    seen: list[int] = []
    while len(seen) < len(rids):
        world.step()
        seen += [at for at, rid in enumerate(rids) if world.heard(rid).tokens and at not in seen]
    return seen


def test_request_runs_and_returns_what_the_model_says() -> None:
    world = World()
    rid = world.gateway.submit(prompt=5, max_tokens=7)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(5, 7) == world.heard(rid).tokens
    assert 1 == world.heard(rid).accepted
    world.assert_empty()


def test_lower_priority_numbers_run_first_and_equals_in_order_of_arrival() -> None:
    world = World(make_config(slots=1))
    rids = [world.gateway.submit(max_tokens=2, priority=priority) for priority in (2, 1, 2, 0)]
    assert [3, 1, 0, 2] == first_token_order(world, rids)


def test_waiting_improves_priority() -> None:
    world = World(make_config(slots=1, ageing_s=10.0))
    running = world.gateway.submit(max_tokens=50)
    world.step(2)
    old = world.gateway.submit(max_tokens=2, priority=1)
    world.step()
    world.clock.advance(10.5)
    new = world.gateway.submit(max_tokens=2, priority=0)
    assert [1, 2] == first_token_order(world, [running, old, new])[1:]


def test_without_ageing_priority_decides_alone() -> None:
    world = World(make_config(slots=1, ageing_s=0.0))
    running = world.gateway.submit(max_tokens=50)
    world.step(2)
    old = world.gateway.submit(max_tokens=2, priority=1)
    world.step()
    world.clock.advance(1000)
    new = world.gateway.submit(max_tokens=2, priority=0)
    assert [2, 1] == first_token_order(world, [running, old, new])[1:]


def test_small_requests_pass_a_blocked_one_a_bounded_number_of_times() -> None:
    world = World(make_config(pages=8, slots=2, max_bypasses=3))
    holder = world.gateway.submit(prompt=16, max_tokens=49)  # 4 pages
    world.step(2)
    big = world.gateway.submit(prompt=64, max_tokens=50)  # 8 pages: waits for the whole pool
    small = [world.gateway.submit(prompt=4, max_tokens=2) for _ in range(6)]
    order = first_token_order(world, [holder, big, *small])
    assert [0, 2, 3, 4, 1, 5, 6, 7] == order
    world.assert_empty()


def test_cancelling_the_blocked_request_lets_the_others_in() -> None:
    world = World(make_config(pages=8, slots=2, max_bypasses=0))
    holder = world.gateway.submit(prompt=16, max_tokens=49)
    world.step(2)
    big = world.gateway.submit(prompt=64, max_tokens=50)
    small = world.gateway.submit(prompt=4, max_tokens=2)
    world.step(4)
    assert [] == world.heard(small).tokens
    world.gateway.cancel(big)
    assert ["cancelled", "length"] == world.finish(big, small)
    assert ["length"] == world.finish(holder)


def test_scan_is_bounded() -> None:
    world = World(make_config(pages=8, slots=3, scan_limit=2))
    holder = world.gateway.submit(prompt=16, max_tokens=49)
    world.step(2)
    blocked = [world.gateway.submit(prompt=64, max_tokens=50) for _ in range(2)]
    small = world.gateway.submit(prompt=4, max_tokens=2)
    world.step(5)
    assert [] == world.heard(small).tokens
    assert {"length"} == set(world.finish(holder, *blocked, small))


def test_one_burst_fills_every_slot_although_a_pass_looks_at_few() -> None:
    world = World(make_config(slots=12, scan_limit=4))
    rids = [world.gateway.submit(max_tokens=30) for _ in range(20)]
    world.step()
    assert (12, 8) == (world.counter("requests_running"), world.counter('requests_waiting{reason="capacity"}'))
    assert 1 == world.counter("plans_total")
    assert {"length"} == set(world.finish(*rids))


def test_what_never_fits_the_context_is_refused_with_the_numbers() -> None:
    world = World(make_config(pages=128))
    answer = refusal(world, world.gateway.submit(prompt=1000, max_tokens=25))
    assert "context_length_exceeded" == answer.code
    assert (
        "1000 prompt tokens + max_tokens 25 = 1025 tokens; the context is 1024 tokens (engine.context_tokens)"
        == answer.message
    )
    assert ["length"] == world.finish(world.gateway.submit(prompt=1000, max_tokens=24))


def test_what_never_fits_the_pool_is_refused_with_the_numbers() -> None:
    config = make_config(pages=4)
    world = World(msgspec.structs.replace(config), executor=False)
    world.start_executor()
    assert world.executor_host is not None and world.executor_host.capabilities is not None
    assert 64 == world.executor_host.capabilities.context_tokens
    answer = refusal(world, world.gateway.submit(prompt=60, max_tokens=5))
    assert "context_length_exceeded" == answer.code
    assert ["length"] == world.finish(world.gateway.submit(prompt=60, max_tokens=4))


def test_full_queue_answers_overloaded_with_a_time_to_come_back() -> None:
    world = World(make_config(slots=1, max_waiting=2))
    done = [world.gateway.submit(max_tokens=2)]
    world.finish(*done)
    for _ in range(2):  # two departures, two seconds apart
        world.clock.advance(2)
        world.finish(world.gateway.submit(max_tokens=2))
    running = world.gateway.submit(max_tokens=40)
    world.step(2)
    waiting = [world.gateway.submit(max_tokens=2) for _ in range(2)]
    world.step()
    answer = refusal(world, world.gateway.submit(max_tokens=2))
    assert ("overloaded", 3) == (answer.code, answer.retry_after_s)  # 2 waiting, 3 departures in 4 s
    assert "2 requests wait, the limit is 2 (scheduler.max_waiting); try again in 3 s" == answer.message
    assert 1 == world.counter('rejections_total{code="overloaded"}')
    assert {"length"} == set(world.finish(running, *waiting))


def test_deadline_in_the_queue_is_a_timeout() -> None:
    world = World(make_config(slots=1))
    running = world.gateway.submit(max_tokens=100)
    world.step(2)
    late = world.gateway.submit(max_tokens=2, deadline_ms=500)
    world.step()
    world.clock.advance(0.6)
    answer = refusal(world, late)
    assert ("timeout", "waited 600 ms in the queue, the limit is 500 ms (server.request_deadline_s)") == (
        answer.code,
        answer.message,
    )
    assert ["length"] == world.finish(running)


def test_deadline_while_running_ends_at_the_executor() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=500, deadline_ms=500)
    world.run_until(lambda: len(world.heard(rid).tokens) == 3)
    world.clock.advance(0.6)
    assert ["deadline"] == world.finish(rid)
    assert isinstance(world.heard(rid).terminals[0], Fin)
    world.assert_empty()


def test_server_wide_deadline_applies_to_requests_without_one() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, request_deadline_s=2.0))
    world = World(config)
    rid = world.gateway.submit(max_tokens=500)
    world.step(8)
    world.clock.advance(2.1)
    assert ["deadline"] == world.finish(rid)


def test_without_an_executor_requests_are_told_so() -> None:
    world = World(executor=False)
    answer = refusal(world, world.gateway.submit())
    assert ("not_ready", 1) == (answer.code, answer.retry_after_s)


def test_two_requests_with_one_rid_run_once() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=20)
    world.step(3)
    world.gateway._counter -= 1
    world.gateway.submit(max_tokens=20)
    heard = world.gateway.heard[rid]
    world.step(40)
    assert "length" == heard.end
    assert 1 == world.counter('stale_messages_total{actor="control"}')


def test_the_queue_has_a_limit_of_its_own() -> None:
    world = World(make_config(slots=1, queue_limit_s=2.0))
    running = world.gateway.submit(max_tokens=200)
    world.step(2)
    late = world.gateway.submit(max_tokens=2)
    world.step()
    world.clock.advance(2.1)
    answer = refusal(world, late)
    assert ("timeout", "waited 2100 ms in the queue, the limit is 2000 ms (scheduler.queue_limit_s)") == (
        answer.code,
        answer.message,
    )
    assert ["length"] == world.finish(running), "it had a slot in time"


def test_a_generation_has_a_limit_of_its_own() -> None:
    world = World(make_config(slots=1, generation_limit_s=5.0))
    first, second = world.gateway.submit(max_tokens=300), world.gateway.submit(max_tokens=300)
    world.step(4)
    world.clock.advance(4.0)
    world.step(4)
    world.clock.advance(1.5)
    assert ["deadline"] == world.finish(first)
    world.clock.advance(4.0)  # of the second's own five
    assert ["length"] == world.finish(second)
    assert "the limit of scheduler.generation_limit_s" in world.heard(first).terminals[0].message
    world.assert_empty()
