"""Why a child ended is told in its own words, also where its end is noticed before they are read."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import pytest

from epicycle.actors import supervisor
from epicycle.actors.supervisor import Supervisor
from epicycle.transport.config import SupervisorConfig
from epicycle.transport.wire.control import Fatal

WHY = "ValueError: engine.slots is 0, must be at least 1"


class Started:
    """A launcher whose children do nothing."""

    @property
    def alive(self) -> list[str]:
        return []

    def start(self, name: str, epoch: int) -> int:
        return 1

    def kill(self, names: Sequence[str], signum: signal.Signals) -> None: ...


async def end_of(said: Fatal | None, has_last_words: bool = True) -> str:
    """The cause of an instance's end whose only executor ends first and is heard, if at all, a moment later."""
    made = Supervisor(SupervisorConfig(), {"ex0": "executor"}, lambda: None, lambda peers: None)
    running = asyncio.create_task(made.run(Started()))
    await asyncio.sleep(0)
    made.on_exit("ex0", "exited with status 70", has_last_words)
    await asyncio.sleep(0)
    assert bool(made.cause) != has_last_words
    if said is not None:
        made.hear(said, lambda message: None)
    assert 1 == await running
    return made.cause


async def test_words_that_come_after_the_end_are_the_reason() -> None:
    assert f"ex0 failed to start: crashed: {WHY}" == await end_of(Fatal("ex0", 1, "crashed", WHY))


async def test_words_that_never_come_are_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAST_WORDS_S", 0.01)
    assert "ex0 failed to start: exited with status 70" == await end_of(None)


async def test_an_end_without_last_words_is_taken_at_once() -> None:
    assert "ex0 failed to start: exited with status 70" == await end_of(None, has_last_words=False)
