"""Keys of prompt pages, what goes first, who publishes, how far pins reach: one case each."""

from __future__ import annotations

import pytest

from epicycle.kvstore.errors import PoolShort
from epicycle.kvstore.page_pool import PagePool
from epicycle.kvstore.prefix_keys import chain_keys, chain_root
from epicycle.transport.wire.columns import I32, pack

ROOT = chain_root("weights", "")


def keys_of(*tokens: int, root: bytes = ROOT) -> tuple[bytes, ...]:
    """Pages of one token."""
    return chain_keys(root, pack(I32, tokens), 1)


def serve(pool: PagePool, owner: str, *tokens: int, pages: int = 0) -> tuple[int, ...]:
    """A request from its claim to its end; its table."""
    table = pool.claim(owner, pages or len(tokens), keys_of(*tokens), len(tokens))
    pool.publish(owner)
    pool.release(owner, has_prompt=True)
    return table


def test_a_key_stands_for_every_token_before_it() -> None:
    assert keys_of(1, 2, 3)[:2] == keys_of(1, 2, 4)[:2]
    assert keys_of(1, 2, 3)[2] != keys_of(1, 2, 4)[2]
    assert not set(keys_of(1, 2, 3)) & set(keys_of(0, 2, 3))


def test_only_full_pages_have_keys() -> None:
    counts = [len(chain_keys(ROOT, pack(I32, range(tokens)), 4)) for tokens in (1, 3, 4, 5, 8)]
    assert [0, 0, 1, 1, 2] == counts


def test_a_root_keeps_its_facts_apart() -> None:
    assert 4 == len({chain_root("a", "b"), chain_root("ab", ""), chain_root("a", 1), chain_root("a", "1")})
    assert not set(keys_of(1, 2)) & set(keys_of(1, 2, root=chain_root("weights", "salt")))


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    pool = PagePool(8)
    serve(pool, "old", 1, 2, 3)
    serve(pool, "new", 1, 5, 6)
    pool.claim("other", 4)  # 3 are free
    assert (2, 3) == (pool.index.known(keys_of(1, 2, 3)), pool.index.known(keys_of(1, 5, 6)))
    pool.grow("other", 3)
    assert (1, 1) == (pool.index.known(keys_of(1, 2, 3)), pool.index.known(keys_of(1, 5, 6)))


def test_a_hit_makes_a_prompt_young_again() -> None:
    pool = PagePool(4)
    serve(pool, "a", 1, 2)
    serve(pool, "b", 3, 4)
    serve(pool, "a", 1, 2)
    pool.claim("other", 2)
    assert (2, 0) == (pool.index.known(keys_of(1, 2)), pool.index.known(keys_of(3, 4)))


def test_a_claim_that_cannot_succeed_evicts_nothing() -> None:
    pool = PagePool(6)
    serve(pool, "cached", 1, 2, 3)
    pool.claim("live", 2)
    with pytest.raises(PoolShort, match="5 pages asked"):
        pool.claim("big", 5)
    with pytest.raises(PoolShort, match="5 pages asked"):
        pool.grow("live", 5)
    assert (3, 1) == (pool.index.known(keys_of(1, 2, 3)), pool.free_pages)


def test_hits_are_not_evicted_for_their_own_claim() -> None:
    pool = PagePool(4)
    table = serve(pool, "first", 1, 2, 3)
    with pytest.raises(PoolShort):
        pool.claim("again", 5, keys_of(1, 2, 3), 3)
    assert table == pool.claim("again", 4, keys_of(1, 2, 3), 3)[:3]


def test_rows_in_flight_share_what_one_of_them_has_published() -> None:
    pool = PagePool(8)
    first = pool.claim("first", 3, keys_of(1, 2), 2)
    assert 0 == pool.index.known(keys_of(1, 2))
    pool.publish("first")
    assert 2 == pool.index.in_rows(keys_of(1, 2))
    second = pool.claim("second", 3, keys_of(1, 2), 2)
    assert (first[:2], 4) == (second[:2], pool.free_pages)
    assert first[2] != second[2]


def test_equal_prompts_computed_at_once_are_kept_once() -> None:
    pool = PagePool(8)
    pool.claim("first", 2, keys_of(1, 2), 2)
    pool.claim("second", 3, keys_of(1, 2, 3), 3)
    pool.publish("first")
    pool.publish("second")
    assert 2 == pool.index.known(keys_of(1, 2, 3))  # the third page's ancestors are the other row's
    pool.release("second", has_prompt=True)
    assert 3 == pool.index.known(keys_of(1, 2, 3))
    pool.release("first", has_prompt=True)
    assert (3, 5) == (pool.index.idle_pages, pool.free_pages)


def test_a_row_replaces_pages_that_nobody_uses_by_its_own() -> None:
    pool = PagePool(8)
    table = pool.claim("late", 3, keys_of(1, 2, 3), 3)
    serve(pool, "early", 1, 2)
    pool.publish("late")
    assert (3, 5, 0) == (pool.index.in_use(keys_of(1, 2, 3)), pool.free_pages, pool.index.idle_pages)
    assert table == pool.claim("third", 3, keys_of(1, 2, 3), 3)


def test_a_prompt_that_was_not_finished_is_not_published() -> None:
    pool = PagePool(8)
    pool.claim("cut", 3, keys_of(1, 2, 3), 3)
    pool.release("cut", has_prompt=False)
    assert (0, 8) == (len(pool.index), pool.free_pages)


def test_reset_forgets_what_live_rows_hold_and_does_not_learn_it_again() -> None:
    pool = PagePool(8)
    serve(pool, "idle", 7, 8)
    pool.claim("published", 2, keys_of(1, 2), 2)
    pool.publish("published")
    pool.claim("unpublished", 2, keys_of(3, 4), 2)
    pool.index.pin("session", keys_of(7, 8), 10.0, 8)
    assert 2 == pool.reset()
    pool.publish("unpublished")
    for owner in ("published", "unpublished"):
        pool.release(owner, has_prompt=True)
    assert (0, 0, 8) == (len(pool.index), pool.index.pinned_pages, pool.free_pages)


def test_pinned_pages_outlive_pressure_until_their_time_is_over() -> None:
    pool = PagePool(4)
    serve(pool, "a", 1, 2)
    pool.index.pin("session", keys_of(1, 2), 10.0, 4)
    assert (2, 2) == (pool.available_pages, pool.index.pinned_pages)
    with pytest.raises(PoolShort):
        pool.claim("big", 3)
    pool.index.expire(9.0)
    assert 2 == pool.available_pages
    pool.index.expire(10.0)
    assert 4 == len(pool.claim("big", 4))


def test_an_urgent_claim_breaks_pins_and_the_reserve_but_takes_no_more_than_there_is() -> None:
    pool = PagePool(6, reserve_pages=1)
    serve(pool, "a", 1, 2)
    serve(pool, "b", 3, 4)
    pool.index.pin("a", keys_of(1, 2), 1.0, 4)
    pool.index.pin("b", keys_of(3, 4), 2.0, 4)
    with pytest.raises(PoolShort):
        pool.claim("big", 7, is_urgent=True)
    assert (2, 6) == (pool.available_pages, pool.obtainable_pages)
    pool.claim("big", 4, is_urgent=True)
    assert (0, 2) == (pool.index.known(keys_of(1, 2)), pool.index.pinned_pages)


def test_pins_give_way_oldest_first_and_then_at_their_end() -> None:
    pool = PagePool(8)
    serve(pool, "a", 1, 2)
    serve(pool, "b", 3, 4, 5)
    pool.index.pin("a", keys_of(1, 2), 1.0, 4)
    pool.index.pin("b", keys_of(3, 4, 5), 2.0, 4)
    assert (3, 0) == (pool.index.pinned_pages, pool.index.in_use(keys_of(1, 2)))
    pool.index.pin("b", keys_of(3, 4, 5), 3.0, 2)
    assert (2, 2) == (pool.index.pinned_pages, pool.index.in_use(keys_of(3, 4, 5)))


def test_the_reserve_is_not_evicted() -> None:
    pool = PagePool(6, reserve_pages=2)
    serve(pool, "a", 1, 2, 3, 4)
    assert (2, 4) == (pool.free_pages, pool.available_pages)
    pool.claim("big", 4)
    assert 2 == pool.index.known(keys_of(1, 2, 3, 4))
    with pytest.raises(PoolShort):
        pool.grow("big", 1)
