"""Prompts computed by one executor and decoded by another: tokens, accounts, cancels and deaths at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from epicycle.actors.executor import KINDS
from epicycle.transport.wire.transfer import TransferFailure
from tests.fakes.split_pump import STAGES, Hub, split_engine
from tests.sim.world import World, expected_tokens, make_config

PAGE = 16


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setitem(KINDS, "mock", split_engine(hub))
    return hub


def make_world(split: tuple[int, int] = (1, 1), **config: Any) -> World:
    return World(make_config(split=split, **config))


def kill(world: World, hub: Hub, name: str) -> None:
    hub.dead.add(world.executor_hosts[name].epoch)
    world.kill_executor(name)


@pytest.fixture
def world(hub: Hub) -> Iterator[World]:
    """ex0 computes prompts, ex1 decodes."""
    yield make_world()


@pytest.mark.parametrize("prompt", [1, PAGE - 1, PAGE, PAGE + 1, 100])
def test_tokens_are_those_of_one_executor(world: World, hub: Hub, prompt: int) -> None:
    rid = world.gateway.submit(prompt=prompt, max_tokens=12)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(prompt, 12) == world.heard(rid).tokens
    world.assert_empty()
    assert 1 == hub.written


def test_prompts_are_computed_on_one_and_tokens_made_on_the_other(world: World) -> None:
    rids = [world.gateway.submit(prompt=40 + at, max_tokens=10) for at in range(3)]
    assert ["length"] * 3 == world.finish(*rids)
    world.assert_empty()
    assert 0 == world.counter('generation_tokens_total{executor="ex0"}')
    assert 30 == world.counter('generation_tokens_total{executor="ex1"}')
    assert {2} == {world.heard(rid).executor_epoch for rid in rids}


def test_a_row_waits_for_its_kv_and_the_others_do_not(world: World, hub: Hub) -> None:
    first = world.gateway.submit(prompt=20, max_tokens=100)
    world.run_until(lambda: bool(world.heard(first).tokens))
    hub.held = "write"
    second = world.gateway.submit(prompt=20, max_tokens=4)
    before = len(world.heard(first).tokens)
    world.step(20)
    assert ([], True) == (world.heard(second).tokens, len(world.heard(first).tokens) > before + 10)
    hub.held = ""
    assert ["length"] * 2 == world.finish(first, second)
    world.assert_empty()


def test_what_the_decoding_executor_has_cached_is_not_sent(hub: Hub) -> None:
    world = make_world(prefix_cache=True)
    ids = list(range(10, 10 + 5 * PAGE))
    world.finish(world.gateway.submit(ids, max_tokens=2))
    hub.held = "write"
    again = world.gateway.submit([*ids, 7, 8], max_tokens=2)
    world.step(5)
    [row] = world.executors["ex1"]._pump._rows.values()  # type: ignore[union-attr]
    assert (5 * PAGE, True) == (row.join.prefix_tokens, row.join.imports is not None)
    hub.held = ""
    assert ["length"] == world.finish(again)
    world.assert_empty()


def test_a_prompt_that_lacks_little_is_computed_where_it_decodes(hub: Hub) -> None:
    world = make_world(prefix_cache=True, least_tokens=8)
    ids = list(range(10, 10 + 5 * PAGE))
    rids = [world.gateway.submit(tokens, max_tokens=2) for tokens in (ids, ids[:7])]
    world.finish(*rids)
    world.finish(world.gateway.submit([*ids, 7, 8], max_tokens=2))
    assert 1 == hub.written
    world.assert_empty()


def test_scored_prompts_are_computed_where_they_decode(world: World, hub: Hub) -> None:
    scored = world.gateway.submit(prompt=40, max_tokens=2, prompt_logprobs=1)
    only = world.gateway.submit(prompt=40, max_tokens=0)
    assert ["length"] * 2 == world.finish(scored, only)
    assert 0 == hub.written
    assert world.heard(scored).prompt_logprobs
    world.assert_empty()


@pytest.mark.parametrize("stage", STAGES)
def test_cancel_at_every_stage_returns_every_page(world: World, hub: Hub, stage: str) -> None:
    hub.held = stage
    rids = [world.gateway.submit(prompt=60 + at, max_tokens=50) for at in range(3)]
    world.step(12)
    for rid in rids:
        world.gateway.cancel(rid)
    assert ["cancelled"] * 3 == world.finish(*rids)
    hub.held = ""
    world.assert_empty()
    after = world.gateway.submit(prompt=60, max_tokens=5)
    assert ["length"] == world.finish(after)
    assert expected_tokens(60, 5) == world.heard(after).tokens


@pytest.mark.parametrize("blocked", ["ex0", "ex1"])
def test_cancel_before_a_join_was_sent(world: World, hub: Hub, blocked: str) -> None:
    link = world.executor_hosts[blocked].endpoints[0].address
    world.fabric.blocked.add(link)
    rid = world.gateway.submit(prompt=40, max_tokens=50)
    world.step(6)
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    world.fabric.blocked.clear()
    world.assert_empty()


@pytest.mark.parametrize("stage", STAGES)
def test_requests_outlive_the_executor_that_computes_prompts(world: World, hub: Hub, stage: str) -> None:
    hub.held = stage
    rids = [world.gateway.submit(prompt=60 + at, max_tokens=20) for at in range(6)]  # four have slots, two wait
    world.step(12)
    kill(world, hub, "ex0")
    hub.held = ""
    assert ["length"] * 6 == world.finish(*rids)
    assert [expected_tokens(60 + at, 20) for at in range(6)] == [world.heard(rid).tokens for rid in rids]
    world.assert_empty()
    world.start_executor(3, "ex0")
    before = hub.written
    assert ["length"] == world.finish(world.gateway.submit(prompt=60, max_tokens=5))
    assert before + 1 == hub.written
    world.assert_empty()


@pytest.mark.parametrize("stage", STAGES)
def test_the_death_of_the_only_decoding_executor_ends_its_requests(world: World, hub: Hub, stage: str) -> None:
    hub.held = stage
    rids = [world.gateway.submit(prompt=60 + at, max_tokens=50) for at in range(6)]
    world.step(12)
    kill(world, hub, "ex1")
    assert ["engine_lost"] * 6 == world.finish(*rids)
    hub.held = ""
    world.assert_empty()
    world.start_executor(3, "ex1")
    rid = world.gateway.submit(prompt=60, max_tokens=5)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(60, 5) == world.heard(rid).tokens
    world.assert_empty()


def test_the_death_of_one_decoding_executor_spares_the_others(hub: Hub) -> None:
    world = make_world((1, 2), slots=8)
    rids = [world.gateway.submit(prompt=60 + at, max_tokens=40) for at in range(6)]
    world.step(20)
    lost = [rid for rid in rids if world.heard(rid).executor_epoch == 2]
    kill(world, hub, "ex1")
    ends = dict(zip(rids, world.finish(*rids), strict=True))
    assert {rid: "engine_lost" if rid in lost else "length" for rid in rids} == ends
    assert 3 == len(lost)
    world.assert_empty()


def test_several_of_each_share_the_work(hub: Hub) -> None:
    world = make_world((2, 2), slots=4, pages=256)
    rids = [world.gateway.submit(prompt=60 + at, max_tokens=10) for at in range(8)]
    world.step(3)
    running = {unit.name: unit.running for unit in world.control.scheduler.units}
    assert {"ex0": 4, "ex1": 4, "ex2": 4, "ex3": 4} == running
    assert ["length"] * 8 == world.finish(*rids)
    world.assert_empty()


@pytest.mark.parametrize("side", [1, 2])
def test_a_failed_transfer_is_told_to_nobody_and_the_request_runs_again(world: World, hub: Hub, side: int) -> None:
    hub.held = "write"
    rid = world.gateway.submit(prompt=60, max_tokens=20)
    world.step(12)
    hub.to_fail[side] = [TransferFailure(number, "transfer_error", "by the test") for number in hub.transfers]
    assert ["length"] == world.finish(rid)
    assert expected_tokens(60, 20) == world.heard(rid).tokens
    assert 0 == hub.written
    assert 1 == world.counter('transfer_failures_total{code="transfer_error"}')
    world.assert_empty()


def test_a_request_cancelled_while_its_transfer_fails_ends_once(world: World, hub: Hub) -> None:
    hub.held = "write"
    rid = world.gateway.submit(prompt=60, max_tokens=20)
    world.step(12)
    hub.to_fail[2] = [TransferFailure(number, "transfer_idle", "by the test") for number in hub.transfers]
    world.step_executor()
    world.step_control()
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    world.assert_empty()


def test_a_failure_that_is_told_when_tokens_flow_changes_nothing(world: World, hub: Hub) -> None:
    hub.held = "ack"
    rid = world.gateway.submit(prompt=60, max_tokens=60)
    world.run_until(lambda: bool(world.heard(rid).tokens))
    hub.to_fail[1] = [TransferFailure(number, "transfer_idle", "by the test") for number in hub.transfers]
    assert ["length"] == world.finish(rid)
    assert expected_tokens(60, 60) == world.heard(rid).tokens
    hub.held = ""
    world.assert_empty()


def test_a_request_waits_when_no_executor_has_room_for_its_prompt(hub: Hub) -> None:
    world = make_world((1, 2), slots=1)
    hub.held = "write"
    first, second = (world.gateway.submit(prompt=60 + at, max_tokens=4) for at in range(2))
    world.step(10)
    assert (1, 1) == (world.heard(first).accepted, world.control.admission.waiting)
    hub.held = ""
    assert ["length"] * 2 == world.finish(first, second)


def test_drain_waits_for_transfers(world: World, hub: Hub) -> None:
    hub.held = "write"
    rid = world.gateway.submit(prompt=60, max_tokens=4)
    world.step(10)
    world.drain(deadline_ms=10_000)
    world.step(5)
    assert not world.control_host.is_drained
    hub.held = ""
    assert ["length"] == world.finish(rid)
    assert world.control_host.is_drained


def test_a_restarted_control_finds_both_roles_empty(world: World, hub: Hub) -> None:
    hub.held = "write"
    for at in range(4):
        world.gateway.submit(prompt=60 + at, max_tokens=50)
    world.step(12)
    world.restart_control()
    hub.held = ""
    rid = world.gateway.submit(prompt=33, max_tokens=6)
    assert ["length"] == world.finish(rid)
    assert expected_tokens(33, 6) == world.heard(rid).tokens
    world.assert_empty()
