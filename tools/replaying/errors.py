"""What can be wrong with a trace or its target, and what is done about bad rows.

Owns the policy (stop at the first bad row, or count and go on) and the counts by kind that every summary shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

FIRST_TEXTS = 5

Policy = Literal["stop", "skip"]


class ReplayError(Exception):
    """The replay can't go on: a target that isn't there, options that don't fit. The text names value and knob."""


class TraceError(ReplayError):
    """A trace, or one row of it, that can't be used. `line` counts from 1; 0 where no line is at fault."""

    def __init__(self, text: str, *, path: str = "", line: int = 0, field: str = "") -> None:
        where = f"{path}:{line}" if path and line else (path or (f"line {line}" if line else ""))
        super().__init__(": ".join(part for part in (where, field, text) if part))
        self.line = line
        self.field = field


class Faults:
    """Counts of rows left out, by reason, with the first few texts. One per run."""

    def __init__(self, policy: Policy = "stop") -> None:
        self.policy = policy
        self.skipped: Counter[str] = Counter()
        self.texts: list[str] = []

    def bad(self, error: TraceError) -> None:
        """A row that can't be read: raises under "stop", else counts it."""
        if self.policy == "stop":
            raise error
        self.skip("bad row", str(error))

    def skip(self, reason: str, text: str = "") -> None:
        """A row left out for a reason that is no error of the file's."""
        self.skipped[reason] += 1
        if text and len(self.texts) < FIRST_TEXTS:
            self.texts.append(text)
