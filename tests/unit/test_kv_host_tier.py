"""Cached pages on the host: the leading keys are found, the oldest gives way, what is being copied back stays."""

from __future__ import annotations

from epicycle.kvstore.host_tier import HostTier

A, B, C, D = b"a", b"b", b"c", b"d"


def test_leading_keys_that_are_here_are_hits() -> None:
    tier = HostTier(10, 3, 8)
    assert [10, 11] == [tier.spill(A), tier.spill(B)]
    assert (2, 2, 0) == (tier.hits([A, B]), tier.hits([A, B, C, A]), tier.hits([C, A]))
    assert [10, 11] == tier.lock([A, B])


def test_the_least_recently_used_gives_way() -> None:
    tier = HostTier(0, 2, 8)
    tier.spill(A)
    tier.spill(B)
    assert tier.spill(A) is None, "it is here, and counts as used"
    assert 1 == tier.spill(C)
    assert (1, 0, 1) == (tier.hits([A]), tier.hits([B]), tier.hits([C]))


def test_what_is_being_copied_back_stays() -> None:
    tier = HostTier(0, 1, 8)
    tier.spill(A)
    tier.lock([A])
    tier.lock([A])
    tier.unlock([A])
    assert tier.spill(B) is None
    tier.reset()
    assert 1 == tier.hits([A])
    tier.unlock([A])
    assert 0 == tier.spill(B)


def test_no_more_are_on_their_way_than_may_be() -> None:
    tier = HostTier(0, 8, 2)
    assert [0, 1, None] == [tier.spill(A), tier.spill(B), tier.spill(C)]
    tier.arrived(1)
    assert [2, None] == [tier.spill(C), tier.spill(D)]
    assert 3 == tier.spilled_pages == len(tier)


def test_without_host_pages_nothing_is_kept() -> None:
    tier = HostTier(4, 0, 8)
    assert (None, 0, []) == (tier.spill(A), tier.hits([A]), tier.lock([]))
