"""Processes die; every request still ends once, and the books still balance."""

from __future__ import annotations

import pytest

from epicycle.actors.executor import KINDS
from epicycle.actors.mock_pump import MockEngine, MockPump
from epicycle.transport.wire.columns import I32, pack, unpack_list
from epicycle.transport.wire.control import Drain
from epicycle.transport.wire.plan import Evict, Plan, Reset, StepReport
from tests.sim.world import World, expected_tokens, make_config


def test_dead_gateway_frees_what_its_requests_held() -> None:
    world = World(make_config(slots=3), gateways=2)
    lost = [world.gateways[1].submit(max_tokens=400) for _ in range(4)]  # three run, one waits
    world.step(8)
    kept = world.gateways[0].submit(max_tokens=5)
    world.kill_gateway(1)
    assert ["length"] == world.finish(kept)
    assert [[]] * 4 == [world.heard(rid).terminals for rid in lost]
    world.assert_empty()


def test_gateway_comes_back_with_new_requests_only() -> None:
    world = World(gateways=2)
    world.gateways[1].submit(max_tokens=400)
    world.step(8)
    world.kill_gateway(1)
    world.start_gateway(1, epoch=2)
    rid = world.gateways[1].submit(prompt=3, max_tokens=5)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(3, 5) == world.heard(rid).tokens
    assert [rid] == list(world.gateways[1].heard)
    world.assert_empty()


def test_dead_executor_ends_running_and_waiting_requests() -> None:
    world = World(make_config(slots=1))
    running, waiting = world.gateway.submit(max_tokens=50), world.gateway.submit()
    world.step(8)
    world.kill_executor()
    assert ["engine_lost", "engine_lost"] == world.finish(running, waiting)
    assert ["not_ready"] == world.finish(world.gateway.submit())
    assert 0 == world.control.beat_facts().pending


def test_new_executor_starts_from_an_empty_pool() -> None:
    world = World(make_config(slots=1))
    rid = world.gateway.submit(max_tokens=50)
    world.step(8)
    ticks = world.counter("ticks_total")
    world.kill_executor()
    world.start_executor(epoch=2)
    assert ["engine_lost"] == world.finish(rid)
    again = world.gateway.submit(max_tokens=6)
    assert ["length"] == world.finish(again)
    assert expected_tokens(4, 6) == world.heard(again).tokens
    assert world.counter("ticks_total") > ticks
    world.assert_empty()


def test_reports_of_an_old_epoch_are_dropped_and_counted() -> None:
    world = World()
    world.kill_executor()
    world.start_executor(epoch=2)
    rid = world.gateway.submit(max_tokens=20)
    world.step(3)
    before = world.counter('stale_messages_total{actor="control"}')
    freed = pack(I32, [0])
    world.control.take_reports([StepReport(1, 1, 1, freed_slots=freed, freed_gens=pack(I32, [1]))])
    assert before + 1 == world.counter('stale_messages_total{actor="control"}')
    assert ["length"] == world.finish(rid)


def test_restarted_control_resets_the_executor_first() -> None:
    world = World(make_config(slots=2))
    lost = [world.gateway.submit(max_tokens=300) for _ in range(2)]
    world.step(8)
    world.restart_control()
    rid = world.gateway.submit(prompt=6, max_tokens=5)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(6, 5) == world.heard(rid).tokens
    assert [[], []] == [world.heard(rid).terminals for rid in lost]  # theirs to end: the gateway saw control die
    assert 0 == world.counter('stale_messages_total{actor="control"}')
    world.assert_empty()


def test_what_happens_between_two_controls_is_not_reported_to_the_second() -> None:
    world = World(make_config(slots=2))
    assert world.executor_host is not None
    world.gateway.submit(max_tokens=300)
    world.step(8)
    report_link = world.control_host.endpoints[2].address
    world.fabric.blocked.add(report_link)
    world.step(3)
    world.restart_control()
    world.step(3)
    assert 0 == world.counter('stale_messages_total{actor="control"}')
    assert 0 == world.control.beat_facts().pending
    world.assert_empty()


def test_last_words_of_a_dead_control_change_nothing() -> None:
    world = World(make_config(slots=2))
    assert world.executor is not None and world.executor_host is not None
    stray = world.fabric.connect(world.executor_host.endpoints[0].address)
    world.gateway.submit(max_tokens=300)
    world.step(4)
    world.restart_control()
    world.step(2)
    stray.send(Plan(epoch=1, seq=9, evicts=[Evict(0, 1)], control_epoch=1))
    stray.send(Reset(epoch=1, control_epoch=1))
    rid = world.gateway.submit(max_tokens=8)
    assert ["length"] == world.finish(rid)
    assert 2 == world.executor.beat_facts().counters['stale_messages_total{actor="ex0"}']
    world.assert_empty()


def test_exception_in_a_tick_leaves_the_executor() -> None:
    class BrokenPump(MockPump):
        def tick(self) -> None:
            raise RuntimeError("the device is gone")

    class BrokenEngine(MockEngine):
        def new_pump(self, epoch: int) -> MockPump:
            return BrokenPump(self.capabilities(), epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "mock", BrokenEngine)
        world = World(executor=False)
        with pytest.raises(RuntimeError, match="the device is gone"):
            world.start_executor()


def admitting(world: World, number: int = 0) -> tuple[int, list[int]]:
    """What control last said to a gateway: its epoch, and those of the executors that it takes requests for."""
    world.step()
    word = world.gateways[number].admitting
    assert word is not None
    return word.control_epoch, unpack_list(I32, word.executor_epochs)


def test_control_says_whom_it_takes_requests_for() -> None:
    world = World(make_config(replicas=2), gateways=2, executor=False)
    assert (1, []) == admitting(world)
    world.start_executor(1, "ex0")
    world.start_executor(2, "ex1")
    assert [(1, [1, 2])] * 2 == [admitting(world, number) for number in range(2)]
    world.kill_executor("ex0")
    assert (1, [2]) == admitting(world)
    world.kill_gateway(1)
    world.start_gateway(1, epoch=2)
    assert (1, [2]) == admitting(world, 1)
    world.restart_control()
    assert [(2, [2])] * 2 == [admitting(world, number) for number in range(2)]
    assert ["length"] == world.finish(world.gateway.submit())


def test_an_executor_that_only_reads_prompts_makes_nobody_ready() -> None:
    world = World(make_config(split=(1, 1)), executor=False)
    prefill, decode = sorted(world.roles, key=lambda name: world.roles[name] != "prefill")
    world.start_executor(1, prefill)
    assert (1, []) == admitting(world)
    world.start_executor(2, decode)
    assert (1, [2]) == admitting(world)


def test_a_split_waits_once_for_whoever_computes_its_prompts() -> None:
    world = World(make_config(split=(1, 1)), executor=False)
    prefill, decode = sorted(world.roles, key=lambda name: world.roles[name] != "prefill")
    world.start_executor(1, decode)
    assert (1, []) == admitting(world)
    world.start_executor(2, prefill)
    assert (1, [1]) == admitting(world)
    world.kill_executor(prefill)
    assert (1, [1]) == admitting(world)


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    world = World(make_config(slots=1))
    running, waiting = world.gateway.submit(max_tokens=20), world.gateway.submit()
    world.step(8)
    world.drain(deadline_ms=10_000)
    late = world.gateway.submit()
    assert ["draining", "draining"] == world.finish(waiting, late)
    assert not world.control_host.is_drained
    assert ["length"] == world.finish(running)
    assert world.control_host.is_drained
    world.assert_empty()


def test_drain_aborts_what_outlives_its_deadline() -> None:
    world = World()
    running = world.gateway.submit(max_tokens=900)
    world.step(8)
    world.drain(deadline_ms=1000)
    world.step(3)
    world.clock.advance(1.1)
    assert ["shutdown"] == world.finish(running)
    assert world.control_host.is_drained


def test_idle_executor_drains_at_once() -> None:
    world = World()
    assert world.executor_host is not None
    world.step(3)
    world.executor_host.drain(Drain(5000), is_queued=True)
    world.executor_host.pump_events()
    world.step_executor()
    assert world.executor_host.is_drained
