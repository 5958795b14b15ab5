"""Reservation arithmetic: whole lives, first claims and growth."""

from __future__ import annotations

import pytest

from epicycle.kvstore.errors import RequestTooLong, ReserveRefused
from epicycle.kvstore.reserve import ReserveRule, capacity_tokens, fits_ever, lifetime_pages, require_fits_ever

LIFETIME = ReserveRule(page_tokens=16)
GROWING = ReserveRule(page_tokens=16, grow_tokens=32, low_water_tokens=8)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"), [(1, 1, 1), (16, 1, 1), (16, 2, 2), (17, 1, 2), (2_048, 1, 128), (2_048, 2, 129)]
)
def test_a_lifetime_leaves_out_the_last_sample(prompt: int, max_tokens: int, pages: int) -> None:
    assert prompt + max_tokens - 1 == capacity_tokens(prompt, max_tokens)
    assert pages == lifetime_pages(prompt, max_tokens, 16)


def test_a_lifetime_reservation_claims_all_and_never_grows() -> None:
    assert 10 == LIFETIME.first_pages(100, 61)
    assert 0 == LIFETIME.growth_pages(160, 10, 100, 61)


def test_an_incremental_reservation_claims_the_prompt_the_mark_and_one_step() -> None:
    assert 9 == GROWING.first_pages(100, 1_000)
    assert 7 == GROWING.first_pages(100, 5)


def test_growth_waits_for_the_low_water_mark() -> None:
    assert 0 == GROWING.growth_pages(136, 9, 100, 1_000)
    assert 3 == GROWING.growth_pages(137, 9, 100, 1_000)


def test_growth_stops_at_the_lifetime() -> None:
    assert 1 == GROWING.growth_pages(140, 9, 100, 55)
    assert 0 == GROWING.growth_pages(150, 10, 100, 55)


def test_a_request_larger_than_the_pool_never_fits() -> None:
    assert fits_ever(100, 61, 16, 10)
    assert not fits_ever(100, 62, 16, 10)
    with pytest.raises(
        RequestTooLong, match=r"needs 11 pages of 16 tokens; the pool has 10: lower max_tokens"
    ) as error:
        require_fits_ever(100, 62, 16, 10)
    assert "context_length_exceeded" == error.value.code
    require_fits_ever(100, 61, 16, 10)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 1), (1, 0), (-3, 8)])
def test_lengths_below_one_are_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(RequestTooLong, match="both must be at least 1"):
        lifetime_pages(prompt, max_tokens, 16)


@pytest.mark.parametrize(("field", "value"), [("page_tokens", 0), ("grow_tokens", 0), ("low_water_tokens", 0)])
def test_a_rule_that_could_never_grow_is_refused(field: str, value: int) -> None:
    with pytest.raises(ReserveRefused, match=f"{field} is {value}; it must be at least 1"):
        ReserveRule(**{"page_tokens": 16, field: value})
