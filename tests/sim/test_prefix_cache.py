"""The prefix cache in the whole server: who hits what, what pressure and resets do, and what it never costs.

The mock executor checks every shared page against the prompt it is shared for.
"""

from __future__ import annotations

from typing import Any

import pytest

from epicycle.actors.mock_model import KEPT_HEADS
from tests.sim.world import LOOPS, World, expected_tokens, make_config


def cached(**config: Any) -> World:
    return World(make_config(prefix_cache=True, **config))


def ask(world: World, prompt: int | list[int], max_tokens: int = 4, **fields: Any) -> int:
    """Serve one request to its end; how many of its prompt's tokens were cached."""
    rid = world.gateway.submit(prompt, max_tokens, **fields)
    assert ["length"] == world.finish(rid)
    if isinstance(prompt, int):
        assert expected_tokens(prompt, max_tokens) == world.heard(rid).tokens
    return int(world.heard(rid).cached_tokens)


def test_repeats_start_at_the_first_token_that_is_not_cached() -> None:
    world = cached()
    assert [0, 32, 32, 48] == [ask(world, prompt) for prompt in (40, 40, 50, 70)]
    assert 40 + 40 + 50 + 70 == world.counter("prefix_query_tokens_total")
    assert 32 + 32 + 48 == world.counter("prefix_hit_tokens_total")
    computed = 40 + 8 + 18 + 22
    assert LOOPS * computed == world.counter('core_row_loops_total{kind="prompt"}')
    world.assert_empty()


def test_a_repeat_of_whole_pages_starts_at_the_head_and_computes_nothing() -> None:
    world = cached()
    rids = [world.gateway.submit(64, 5) for _ in range(2)]
    world.finish(*rids)
    assert [0, 64, 64] == [*(world.heard(rid).cached_tokens for rid in rids), ask(world, 64)]
    assert LOOPS * 64 == world.counter('core_row_loops_total{kind="prompt"}')
    assert 2 * 64 == world.counter("prefix_hit_tokens_total")
    assert [expected_tokens(64, 5)] * 2 == [world.heard(rid).tokens for rid in rids]
    world.assert_empty()


def test_a_whole_repeat_whose_head_has_given_way_computes_its_last_token_alone() -> None:
    world = cached()
    ask(world, 64)
    for first in range(100, 100 + KEPT_HEADS):
        ask(world, list(range(first, first + 16)))
    assert [63, 64] == [ask(world, 64), ask(world, 64)]


def test_heads_are_forgotten_with_the_cache_and_kept_apart_by_salt() -> None:
    world = cached()
    assert [0, 0, 64] == [ask(world, 64), ask(world, 64, cache_salt="other"), ask(world, 64)]
    world.gateway.reset_cache(1)
    assert [0, 64] == [ask(world, 64), ask(world, 64)]


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_logprobs": 1}])
def test_who_wants_more_of_the_prompt_than_its_end_does_not_start_at_the_head(fields: dict[str, int]) -> None:
    world = cached()
    ask(world, 64)
    asked: dict[str, Any] = {"max_tokens": 2} | fields
    assert (0 if "prompt_logprobs" in fields else 63) == ask(world, 64, **asked)


def test_a_prompt_that_is_cancelled_leaves_no_head() -> None:
    world = cached(chunk_tokens=16)
    rid = world.gateway.submit(64, 4)
    world.step(6)
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    assert [0, 64] == [ask(world, 64), ask(world, 64)]


def test_a_request_that_ends_with_its_first_token_leaves_its_prompt_behind() -> None:
    world = cached()
    assert [0, 32, 32] == [ask(world, 40, max_tokens) for max_tokens in (1, 0, 1)]


def test_short_prompts_and_half_pages_are_not_cached() -> None:
    world = cached()
    assert [0, 0] == [ask(world, 15), ask(world, 15)]
    assert 0 == world.counter('kv_pages{state="prefix"}')


def test_salts_and_noise_keep_prompts_apart() -> None:
    world = cached()
    hits = [ask(world, 40, cache_salt=salt) for salt in ("", "tenant a", "tenant b", "tenant a")]
    assert [0, 0, 0, 32] == hits


def test_prompt_logprobs_are_computed_whole_and_still_published() -> None:
    world = cached()
    assert [0, 0] == [ask(world, 40, prompt_logprobs=1), ask(world, 40, prompt_logprobs=1)]
    assert 0 == world.counter("prefix_query_tokens_total")
    assert 32 == ask(world, 40)


def test_a_joiner_shares_the_prompt_of_a_running_row() -> None:
    world = cached()
    first = world.gateway.submit(40, 60)
    world.run_until(lambda: len(world.heard(first).tokens) > 2)
    second = world.gateway.submit(40, 60)
    world.run_until(lambda: len(world.heard(second).tokens) > 0)
    assert 32 == world.heard(second).cached_tokens
    assert 7 + 7 - 2 == world.counter('kv_pages{state="live"}')
    assert ["length", "length"] == world.finish(first, second)
    assert expected_tokens(40, 60) == world.heard(second).tokens
    world.assert_empty()


def test_prompts_that_live_rows_hold_cost_a_newcomer_nothing() -> None:
    world = cached(pages=64, reservation="lifetime")
    first = world.gateway.submit(800, 100)  # 57 pages, 50 of them full prompt pages
    world.run_until(lambda: len(world.heard(first).tokens) > 2)
    second = world.gateway.submit(800, 100)  # 7 more, and 7 are free
    world.run_until(lambda: len(world.heard(second).tokens) > 0)
    assert 0 == world.counter('kv_pages{state="free"}')
    assert ["length", "length"] == world.finish(first, second)


def test_one_that_waits_gets_in_when_its_prompt_becomes_shareable() -> None:
    world = cached(pages=64, chunk_tokens=16)
    rids = [world.gateway.submit(800, 100), world.gateway.submit(800, 100)]
    world.run_until(lambda: len(world.heard(rids[1]).tokens) > 0)
    assert [] == world.heard(rids[0]).terminals
    assert ["length", "length"] == world.finish(*rids)


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    world = cached(slots=4, chunk_tokens=16)
    rids = [world.gateway.submit(100, 20) for _ in range(4)]
    other = world.gateway.submit(list(range(400, 500)), 20)
    world.run_until(lambda: len(world.heard(other).tokens) > 0)
    assert ["length"] * 5 == world.finish(*rids, other)
    assert [0, 96, 96, 96, 0] == [world.heard(rid).cached_tokens for rid in (*rids, other)]
    assert [expected_tokens(100, 20)] * 4 == [world.heard(rid).tokens for rid in rids]
    world.assert_empty()


def test_prompts_that_begin_with_the_same_chunk_compute_it_once() -> None:
    world = cached(slots=4, chunk_tokens=32)
    trunk = list(range(100, 164))
    prompts = [trunk + list(range(start, start + 40)) for start in (300, 400, 500)]
    rids = [world.gateway.submit(prompt, 4) for prompt in prompts]
    unlike = world.gateway.submit(trunk[:20] + prompts[0], 4)
    world.step(3)
    assert [1, 0, 0, 1] == [world.heard(rid).accepted for rid in (*rids, unlike)]
    assert ["length"] * 4 == world.finish(*rids, unlike)
    assert [0, 64, 64, 0] == [world.heard(rid).cached_tokens for rid in (*rids, unlike)]
    world.assert_empty()


def test_those_who_wait_for_a_prompt_go_on_when_its_request_is_cancelled() -> None:
    world = cached(chunk_tokens=16)
    rids = [world.gateway.submit(100, 20) for _ in range(3)]
    world.step(4)
    world.gateway.cancel(rids[0])
    assert ["cancelled", "length", "length"] == world.finish(*rids)
    assert [0, 96] == [world.heard(rid).cached_tokens for rid in rids[1:]]
    world.assert_empty()


def test_prompt_logprobs_wait_for_nobody() -> None:
    world = cached(chunk_tokens=16)
    first, second = world.gateway.submit(100, 4), world.gateway.submit(100, 4, prompt_logprobs=0)
    world.step(4)
    assert (1, 1) == (world.heard(first).accepted, world.heard(second).accepted)
    assert ["length", "length"] == world.finish(first, second)


def test_live_requests_take_cached_pages_and_the_oldest_go_first() -> None:
    world = cached(pages=8)
    old, new = list(range(100, 148)), list(range(200, 248))
    ask(world, old)
    ask(world, new)
    assert (6, 2) == (world.counter('kv_pages{state="prefix"}'), world.counter('kv_pages{state="free"}'))
    ask(world, list(range(300, 330)), 35)  # 4 pages
    assert [48, 16] == [ask(world, new), ask(world, old)]
    world.assert_empty()


def test_the_whole_pool_can_be_had_whatever_is_cached() -> None:
    world = cached(pages=8)
    for start in (100, 200):
        ask(world, list(range(start, start + 60)))
    assert 6 == world.counter('kv_pages{state="prefix"}')
    assert 0 == ask(world, list(range(300, 399)), 29)  # 8 pages
    world.assert_empty()


def test_growing_rows_take_cached_pages_before_anybody_yields() -> None:
    world = cached(pages=8, reservation="incremental", low_water_tokens=4, grow_tokens=16)
    ask(world, list(range(100, 180)))
    rid = world.gateway.submit(16, 112)  # 8 pages in the end
    assert ["length"] == world.finish(rid)
    assert (112, 0) == (len(world.heard(rid).tokens), world.counter("yielded_rows_total"))
    world.assert_empty()


def test_a_cancelled_prompt_is_not_shared() -> None:
    world = cached(chunk_tokens=16)
    rid = world.gateway.submit(200, 4)
    world.step(6)
    world.gateway.cancel(rid)
    assert ["cancelled"] == world.finish(rid)
    assert 0 == world.counter('kv_pages{state="prefix"}')
    assert 0 == ask(world, 200)


def test_a_session_keeps_its_prompt_over_a_gap_and_no_longer() -> None:
    world = cached(pages=24, session_pin_s=60.0, session_pin_pages=4, slots=4)
    ask(world, 40, session_id="s")
    assert 2 == world.counter("session_pinned_pages")
    ask(world, list(range(500, 850)), 3)  # 22 pages: all the others
    world.clock.advance(59.0)
    world.step()
    assert 32 == ask(world, 40, session_id="s")
    world.clock.advance(59.0)
    world.step()
    assert 2 == world.counter("session_pinned_pages")
    world.clock.advance(1.0)
    world.step()
    assert 0 == world.counter("session_pinned_pages")
    assert 32 == ask(world, 40)  # unpinned is not evicted
    world.assert_empty()


def test_a_session_keeps_its_last_prompt_only_and_salts_keep_sessions_apart() -> None:
    world = cached()
    ask(world, 40, session_id="s")
    ask(world, 80, session_id="s")
    assert 5 == world.counter("session_pinned_pages")
    ask(world, 20, session_id="s", cache_salt="other")
    assert 6 == world.counter("session_pinned_pages")
    ask(world, 20, session_id="s")
    assert 2 == world.counter("session_pinned_pages")


def test_reset_empties_the_cache_and_leaves_running_rows_alone() -> None:
    world = cached()
    ask(world, list(range(300, 340)), session_id="s")
    running = world.gateway.submit(40, 50)
    world.run_until(lambda: len(world.heard(running).tokens) > 2)
    world.gateway.reset_cache(7)
    world.step(2)
    assert [(7, 2)] == [(answer.ref, answer.freed_pages) for answer in world.gateway.resets]
    assert (0, 0) == (world.counter('kv_pages{state="prefix"}'), world.counter("session_pinned_pages"))
    assert ["length"] == world.finish(running)
    assert expected_tokens(40, 50) == world.heard(running).tokens
    assert 0 == ask(world, 40)
    world.assert_empty()


def test_reset_without_an_executor_has_nothing_to_free() -> None:
    world = World(make_config(prefix_cache=True), executor=False)
    world.gateway.reset_cache(1)
    world.step(2)
    assert [0] == [answer.freed_pages for answer in world.gateway.resets]


def test_a_new_executor_and_a_new_control_start_with_an_empty_cache() -> None:
    world = cached()
    assert [0, 32] == [ask(world, 40), ask(world, 40)]
    world.kill_executor()
    world.start_executor(2)
    assert [0, 32] == [ask(world, 40), ask(world, 40)]
    assert 64 == world.counter("prefix_hit_tokens_total")
    world.restart_control()
    assert [0, 32] == [ask(world, 40), ask(world, 40)]
    world.assert_empty()


def test_without_the_cache_nothing_is_kept() -> None:
    world = World(make_config())
    assert [0, 0] == [ask(world, 40), ask(world, 40)]
    assert (0, 0) == (world.counter('kv_pages{state="prefix"}'), world.counter("prefix_query_tokens_total"))
