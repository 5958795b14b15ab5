"""A peer that reads slowly: plans merge, reports merge, tokens merge; nothing is lost and nobody waits."""

from __future__ import annotations

from epicycle.actors.mock_model import mock_logprob
from epicycle.transport.wire.request import LoopBounds
from tests.sim.world import LOOPS, World, expected_tokens, make_config


def plan_link(world: World) -> str:
    assert world.executor_host is not None
    return world.executor_host.endpoints[0].address


def token_link(world: World, number: int = 0) -> str:
    return world.gateways[number].tokens.address


def test_plans_merge_into_one_while_the_executor_is_slow() -> None:
    world = World()
    world.step(2)
    before = world.counter("plans_total")
    world.fabric.blocked.add(plan_link(world))
    rids = []
    for _ in range(3):
        rids.append(world.gateway.submit(max_tokens=3))
        world.step()
    assert [0, 0, 0] == [world.heard(rid).accepted for rid in rids]
    world.fabric.blocked.clear()
    world.step()
    assert before + 1 == world.counter("plans_total")
    assert 2 == world.counter("merged_plan_changes_total")
    assert ["length"] * 3 == world.finish(*rids)
    world.assert_empty()


def test_reset_is_first_even_when_it_had_to_wait() -> None:
    world = World(executor=False)
    world.fabric.blocked.add("local:ex0.e1.plan")
    world.start_executor()
    assert plan_link(world) in world.fabric.blocked
    rid = world.gateway.submit(max_tokens=3)
    world.step(3)
    world.fabric.blocked.clear()
    assert ["length"] == world.finish(rid)
    assert 0 == world.counter('stale_messages_total{actor="control"}')


def test_reports_merge_while_control_is_slow() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=10)
    world.step(2)
    report_link = world.control_host.endpoints[2].address
    world.fabric.blocked.add(report_link)
    world.step(30)
    assert "length" == world.heard(rid).end
    assert 1 == world.counter("requests_running")
    world.fabric.blocked.clear()
    world.assert_empty()
    assert 10 == world.counter("generation_tokens_total")


def test_tokens_merge_per_row_while_a_gateway_is_slow_and_others_keep_their_pace() -> None:
    world = World(gateways=2)
    slow, quick = world.gateways[0].submit(prompt=5, max_tokens=40), world.gateways[1].submit(max_tokens=40)
    world.step(6)
    world.fabric.blocked.add(token_link(world))
    heard = len(world.heard(slow).tokens)
    assert ["length"] == world.finish(quick)
    assert heard == len(world.heard(slow).tokens)
    assert [] == world.heard(slow).terminals
    batches = world.gateways[0].batches
    world.fabric.blocked.clear()
    assert ["length"] == world.finish(slow)
    assert batches + 1 == world.gateways[0].batches
    assert expected_tokens(5, 40) == world.heard(slow).tokens
    world.assert_empty()


def test_logprobs_survive_merging_of_rows_with_and_without_them() -> None:
    world = World()
    rids = [world.gateway.submit(prompt=3 + n, max_tokens=12, logprobs=k) for n, k in enumerate((-1, 0, 3))]
    world.step(1)
    world.fabric.blocked.add(token_link(world))
    world.step(40)
    world.fabric.blocked.clear()
    assert ["length"] * 3 == world.finish(*rids)
    tokens = [expected_tokens(3 + n, 12) for n in range(3)]
    heard = [world.heard(rid) for rid in rids]
    assert tokens == [each.tokens for each in heard]
    assert [[], *([mock_logprob(token) for token in row] for row in tokens[1:])] == [each.logprobs for each in heard]
    assert [[], [], [token + rank for token in tokens[2] for rank in range(3)]] == [each.top_ids for each in heard]


def test_prompt_logprobs_come_before_tokens_however_late() -> None:
    world = World(make_config(chunk_tokens=16))
    world.fabric.blocked.add(token_link(world))
    rid = world.gateway.submit(prompt=40, max_tokens=3, prompt_logprobs=2)
    world.step(30)
    world.fabric.blocked.clear()
    assert ["length"] == world.finish(rid)
    parts = [(part.first, len(part.logprobs) // 4, len(part.top_ids) // 4) for part in world.heard(rid).prompt_logprobs]
    assert [(1, 39)] == [(parts[0][0], sum(count for _, count, _ in parts))]
    assert all(tops == 2 * count for _, count, tops in parts)


def test_verdicts_wait_for_a_slow_gateway() -> None:
    world = World(executor=False)
    world.fabric.blocked.add(world.gateway.verdicts.address)
    rids = [world.gateway.submit() for _ in range(5)]
    world.step(3)
    assert [[]] * 5 == [world.heard(rid).terminals for rid in rids]
    world.fabric.blocked.clear()
    assert ["not_ready"] * 5 == world.finish(*rids)


def test_first_output_runs_full_depth_and_later_ones_stay_in_bounds() -> None:
    world = World()
    rid = world.gateway.submit(max_tokens=30, loops=LoopBounds(min_loops=2, max_loops=3, exit_threshold=0.5))
    world.finish(rid)
    depths = world.heard(rid).depths
    assert LOOPS == depths[0]
    assert {2, 3} == set(depths[1:])
    assert sum(LOOPS - depth for depth in depths[1:]) == world.counter("loops_saved_total")
