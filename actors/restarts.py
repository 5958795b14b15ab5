"""How often a child may die before the server gives up: a count within a sliding window."""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """`allowed` restarts of one child within `window_s` seconds."""

    def __init__(self, allowed: int, window_s: float) -> None:
        self.allowed = allowed
        self.window_s = window_s
        self.total = 0
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Take one restart; False when the window holds `allowed` of them already."""
        while self._times_s and now_s - self._times_s[0] > self.window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self.allowed:
            return False
        self._times_s.append(now_s)
        self.total += 1
        return True
