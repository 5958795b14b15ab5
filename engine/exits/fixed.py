"""Exit rule `fixed`: every token runs `max_loops`; thresholds and gates are not read."""

from __future__ import annotations

from typing import Self

from epicycle.engine.exits.base import ExitDecision, ExitRows, at_limit, settle
from epicycle.engine.exits.registry import RuleSetup


class Fixed:
    @classmethod
    def build(cls, setup: RuleSetup) -> Self:
        return cls()

    def decide(self, rows: ExitRows) -> ExitDecision:
        return settle(at_limit(rows), rows.survival, rows.pending)


def oracle(max_loops: int) -> int:
    """The exit depth of one token on the host."""
    return max_loops
