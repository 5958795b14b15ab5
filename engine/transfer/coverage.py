"""What of a transfer has arrived: every unit once, every part once, and the bytes that they make.

Owns the sets. It must not know who sends, nor how.
"""

from __future__ import annotations

from epicycle.engine.transfer.units import Cut, units_of
from epicycle.transport.wire.transfer import Arrived, Commit


class CoverageError(Exception):
    """What arrived is not what was expected; the text says where."""


class Coverage:
    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._missing = cut.units()
        self._parts: set[int] = set()
        self.bytes = 0

    def mark(self, arrived: Arrived) -> None:
        """Raises CoverageError for a part or a unit that has come before, or was never expected."""
        if arrived.part in self._parts:
            raise CoverageError(f"part {arrived.part} has arrived twice")
        self._parts.add(arrived.part)
        try:
            units = units_of(arrived.runs)
        except (ValueError, TypeError) as error:
            raise CoverageError(f"part {arrived.part} is unreadable: {error}") from error
        for unit in units:
            if unit not in self._missing:
                raise CoverageError(f"page {unit[0]} of plane {unit[1]} has arrived twice or was not expected")
            self._missing.discard(unit)
            self.bytes += self._cut.bytes_of(unit)

    def is_complete(self, commit: Commit) -> bool:
        """All that `commit` names is there. Raises CoverageError where that isn't what was expected."""
        if commit.bytes != self._cut.bytes:
            raise CoverageError(f"{commit.bytes} bytes were sent, {self._cut.bytes} are needed")
        if len(self._parts) < commit.parts:
            return False
        if len(self._parts) > commit.parts or self._missing:
            raise CoverageError(f"{len(self._parts)} of {commit.parts} parts left {len(self._missing)} units out")
        return True
