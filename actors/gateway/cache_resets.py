"""Resets of the prefix cache that control has been asked for and has not answered yet.

Owns their numbers and futures. Must not know HTTP or links.
"""

from __future__ import annotations

import asyncio

from epicycle.actors.gateway.errors import ApiError


class CacheResets:
    """All methods on the gateway's loop."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: dict[int, asyncio.Future[int]] = {}

    def new(self) -> tuple[int, asyncio.Future[int]]:
        """(ref, the pages that the reset frees); the future fails with ApiError when control is lost."""
        self._made += 1
        future = self._waiting[self._made] = asyncio.get_running_loop().create_future()
        return self._made, future

    def forget(self, ref: int) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(ref, None)

    def answer(self, ref: int, freed_pages: int) -> None:
        future = self._waiting.pop(ref, None)
        if future is not None and not future.done():
            future.set_result(freed_pages)

    def fail_all(self, error: ApiError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
