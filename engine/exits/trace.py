"""Exit rule `trace`: a token leaves at the depth listed for its output; gates and thresholds are not read."""

from __future__ import annotations

from typing import Self

from epicycle.engine.exits.base import ExitDecision, ExitRows, at_limit, settle
from epicycle.engine.exits.registry import RuleSetup


class Trace:
    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        return cls()

    def decide(self, rows: ExitRows) -> ExitDecision:
        assert rows.traced_depth is not None
        leave = (rows.loops_done >= rows.traced_depth) | at_limit(rows)
        return settle(leave, rows.survival, rows.pending)


def oracle(listed_depth: int, max_loops: int) -> int:
    """The exit depth of one token on the host."""
    return max(1, min(listed_depth, max_loops))
