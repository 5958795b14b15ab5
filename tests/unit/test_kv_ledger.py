"""The ledger's promises one by one; tests/prop/test_kv_ledger.py mixes them."""

from __future__ import annotations

import pytest

from epicycle.kvstore.errors import KvError, OwnerConflict, PagesImpossible, PoolShort
from epicycle.kvstore.ledger import Hold, Ledger


def test_pages_come_in_ascending_runs_and_return_as_they_left() -> None:
    ledger = Ledger(8)
    assert (0, 1, 2) == ledger.claim("a", 3)
    assert (3, 4) == ledger.claim("b", 2)
    ledger.release("a")
    assert (0, 1, 2, 5) == ledger.claim("c", 4)


def test_growth_appends_to_the_table() -> None:
    ledger = Ledger(4)
    ledger.claim(1, 1)
    ledger.claim(2, 1)
    assert (2, 3) == ledger.grow(1, 2)
    assert (0, 2, 3) == ledger.pages_of(1)


def test_a_claim_that_does_not_fit_takes_nothing() -> None:
    ledger = Ledger(4)
    ledger.claim("a", 3)
    with pytest.raises(PoolShort, match="2 pages asked, 1 of 4 free; nothing taken") as short:
        ledger.claim("b", 2, shared=(0,))
    assert "kv_pool_short" == short.value.code
    assert (1, 1, ()) == (ledger.free_pages, ledger.refs(0), ledger.pages_of("b"))


def test_growth_that_does_not_fit_takes_nothing() -> None:
    ledger = Ledger(2)
    ledger.claim("a", 1)
    ledger.claim("b", 1)
    with pytest.raises(PoolShort):
        ledger.grow("a", 1)
    assert (0,) == ledger.pages_of("a")


@pytest.mark.parametrize("fresh_pages", [-1, 0, 5])
def test_impossible_sizes_are_refused(fresh_pages: int) -> None:
    ledger = Ledger(4)
    with pytest.raises(PagesImpossible):
        ledger.claim("a", fresh_pages)
    assert 4 == ledger.free_pages


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(PagesImpossible, match="needs at least 1"):
        Ledger(0)


def test_one_owner_has_one_table() -> None:
    ledger = Ledger(4)
    ledger.claim("a", 1)
    with pytest.raises(OwnerConflict, match="already holds 1 pages"):
        ledger.claim("a", 1)
    with pytest.raises(OwnerConflict, match="no pages to grow"):
        ledger.grow("b", 1)
    assert 3 == ledger.free_pages


def test_a_second_release_does_nothing() -> None:
    ledger = Ledger(4)
    ledger.claim("a", 2)
    ledger.release("a")
    ledger.claim("b", 2)
    ledger.release("a")
    assert ((0, 1), 2) == (ledger.pages_of("b"), ledger.free_pages)


def test_a_shared_page_is_freed_with_its_last_row() -> None:
    ledger = Ledger(4)
    ledger.claim("parent", 2)
    assert (0, 2) == ledger.claim("child", 1, shared=(0,))
    ledger.release("parent")
    assert (1, 2) == (ledger.refs(0), ledger.free_pages)
    ledger.release("child")
    assert 4 == ledger.free_pages


@pytest.mark.parametrize("shared", [(3,), (4,), (-1,), (0, 0)])
def test_only_pages_in_use_can_be_shared(shared: tuple[int, ...]) -> None:
    ledger = Ledger(4)
    ledger.claim("a", 1)
    with pytest.raises(PagesImpossible):
        ledger.claim("b", 1, shared=shared)
    with pytest.raises(PagesImpossible):
        ledger.hold(Hold.LEASE, shared)
    assert (1, 3) == (ledger.refs(0), ledger.free_pages)


def test_two_leases_delay_a_free_until_the_last_is_dropped() -> None:
    ledger = Ledger(4)
    pages = ledger.claim("a", 2)
    first, second = ledger.hold(Hold.LEASE, pages), ledger.hold(Hold.LEASE, pages)
    ledger.release("a")
    ledger.drop(first)
    ledger.drop(first)
    assert 2 == ledger.free_pages
    ledger.drop(second)
    assert 4 == ledger.free_pages


def test_the_census_counts_each_page_as_the_first_class_that_applies() -> None:
    ledger = Ledger(10)
    leased, live, cached, saved = (ledger.claim(name, 2) for name in ("leased", "live", "cached", "saved"))
    ledger.hold(Hold.LEASE, leased)
    for page in (*leased, *live, *cached):
        ledger.hold(Hold.PREFIX, (page,))
    ledger.hold(Hold.SNAPSHOT, (*leased, *live, *cached, *saved))
    for name in ("cached", "saved"):
        ledger.release(name)
    census = ledger.census()
    assert census.is_even
    assert (
        "census: leased 2 + live 2 + prefix-only 2 + snapshotting 2 + free 2 = 10 of 10 pages, 0 miscounted"
        == census.line()
    )


def test_a_leaked_page_makes_the_census_uneven() -> None:
    ledger = Ledger(4)
    ledger._free.pop()
    census = ledger.census()
    assert not census.is_even
    assert "UNEVEN census: leased 0 + live 0 + prefix-only 0 + snapshotting 0 + free 3 = 3 of 4" in census.line()


def test_a_page_both_free_and_live_makes_the_census_uneven() -> None:
    ledger = Ledger(4)
    ledger.claim("a", 1)
    ledger._free.append(0)
    assert 5 == ledger.census().sum_pages
    assert not ledger.census().is_even


def test_a_wrong_count_makes_the_census_uneven() -> None:
    ledger = Ledger(4)
    ledger.claim("a", 1)
    ledger._refs[0] = 2
    assert (4, 1) == (ledger.census().sum_pages, ledger.census().miscounted_pages)
    assert not ledger.census().is_even


def test_codes_are_distinct_and_stable() -> None:
    assert {
        "context_length_exceeded",
        "kv_geometry_refused",
        "kv_layout_refused",
        "kv_owner_conflict",
        "kv_pages_impossible",
        "kv_plan_refused",
        "kv_pool_short",
        "kv_reserve_refused",
    } == {error.code for error in KvError.__subclasses__()}
