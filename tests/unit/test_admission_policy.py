"""The admission policy is a function of numbers; these are the numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epicycle.actors.admission_policy import PassLimits, PassResult, admission_pass, order_key

LIMITS = PassLimits(scan_limit=64, max_bypasses=8)


def one_pass(pages: list[int], bypasses: list[int], slots: int, free_pages: int, limits: PassLimits) -> PassResult:
    """A pass over a pool of so many slots and pages; `pages[i]` is what position i needs."""
    free = [slots, free_pages]

    def take(position: int) -> bool:
        if pages[position] > free[1]:
            return False
        free[0] -= 1
        free[1] -= pages[position]
        return True

    return admission_pass(take, lambda: free[0] == 0, bypasses, limits)


def test_everything_that_fits_gets_in_in_order() -> None:
    assert PassResult((0, 1, 2), ()) == one_pass([2, 3, 1], [0, 0, 0], 4, 6, LIMITS)


def test_slots_end_a_pass() -> None:
    assert PassResult((0, 1), ()) == one_pass([1, 1, 1], [0, 0, 0], 2, 10, LIMITS)


def test_blocked_request_counts_those_that_pass_it() -> None:
    assert PassResult((1, 2), ((0, 2),)) == one_pass([9, 1, 1], [0, 0, 0], 4, 3, LIMITS)


def test_blocked_request_that_nobody_passes_counts_nothing() -> None:
    assert PassResult((0,), ()) == one_pass([1, 9], [0, 0], 4, 3, LIMITS)


def test_bypasses_of_earlier_passes_count() -> None:
    assert PassResult((1,), ((0, 1),)) == one_pass([9, 1, 1], [7, 0, 0], 4, 3, LIMITS)
    assert PassResult((), ()) == one_pass([9, 1, 1], [8, 0, 0], 4, 3, LIMITS)


def test_no_bypass_allowed_means_strict_order() -> None:
    assert PassResult((0,), ()) == one_pass([1, 9, 1], [0, 0, 0], 4, 3, PassLimits(64, 0))


def test_scan_stops_at_its_limit() -> None:
    assert PassResult((), ()) == one_pass([9, 9, 1], [0, 0, 0], 4, 3, PassLimits(2, 8))


def test_key_improves_by_one_priority_for_each_ageing_time() -> None:
    assert order_key(2, 100.0, 10.0) == order_key(1, 110.0, 10.0)
    assert order_key(2, 99.0, 10.0) < order_key(1, 110.0, 10.0)
    assert 2.0 == order_key(2, 100.0, 0.0)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 10)), max_size=40),
    st.integers(0, 8),
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(0, 8),
)
def test_a_pass_never_gives_away_more_than_there_is(
    queue: list[tuple[int, int]], slots: int, pages: int, scan: int, most: int
) -> None:
    needs, bypasses = [need for need, _ in queue], [passed for _, passed in queue]
    result = one_pass(needs, bypasses, slots, pages, PassLimits(scan, most))
    assert len(result.admitted) <= slots
    assert sum(needs[at] for at in result.admitted) <= pages
    assert list(result.admitted) == sorted(at for at in result.admitted if at < scan)
    for at, passed in result.bypassed:
        assert passed == sum(later > at for later in result.admitted)
        assert bypasses[at] + passed <= max(most, bypasses[at])
