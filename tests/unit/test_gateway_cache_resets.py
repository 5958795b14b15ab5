"""Resets of the prefix cache on their way to control and back."""

from __future__ import annotations

import pytest

from epicycle.actors.gateway.cache_resets import CacheResets
from epicycle.actors.gateway.errors import ApiError


async def test_each_reset_gets_its_own_answer() -> None:
    resets = CacheResets()
    (first, one), (second, two) = resets.new(), resets.new()
    resets.answer(second, 7)
    resets.answer(first, 3)
    resets.answer(first, 9)
    assert (3, 7) == (await one, await two)


async def test_losing_control_fails_those_that_wait_and_no_others() -> None:
    resets = CacheResets()
    (answered, done), (left, cancelled), (_, waiting) = resets.new(), resets.new(), resets.new()
    resets.answer(answered, 1)
    cancelled.cancel()
    resets.fail_all(ApiError("engine_lost", "the control process is gone"))
    resets.answer(left, 5)
    assert (1, True) == (await done, cancelled.cancelled())
    with pytest.raises(ApiError, match="control process is gone"):
        await waiting


async def test_nobody_is_told_what_nobody_waits_for() -> None:
    resets = CacheResets()
    ref, future = resets.new()
    resets.forget(ref)
    resets.answer(ref, 4)
    assert not future.done()
