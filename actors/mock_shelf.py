"""Rows that are off the mock executor for a while. Copies take a few ticks, as a device's do.

Owns who is on the way out, away, and on the way back. It must not know pages' contents or messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

COPY_TICKS = 2

Row = TypeVar("Row")


@dataclass
class MockShelf(Generic[Row]):
    """`leaving` and `coming` hold, by slot, a row and the ticks that its copies still take; `away` rows by rid."""

    leaving: dict[int, tuple[Row, int]] = field(default_factory=dict)
    coming: dict[int, tuple[Row, int]] = field(default_factory=dict)
    away: dict[int, Row] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        return bool(self.leaving or self.coming)

    def is_moving(self, slot: int) -> bool:
        return slot in self.leaving or slot in self.coming

    def leave(self, slot: int, row: Row) -> None:
        self.coming.pop(slot, None)
        self.leaving[slot] = row, COPY_TICKS

    def come(self, slot: int, row: Row) -> None:
        self.coming[slot] = row, COPY_TICKS

    def forget(self, slot: int) -> None:
        """The row in `slot` has ended on the way."""
        self.leaving.pop(slot, None)
        self.coming.pop(slot, None)

    def tick(self) -> list[Row]:
        """One tick passes: rows whose copies out are done now."""
        out = [(slot, row) for slot, (row, ticks) in self.leaving.items() if ticks == 1]
        self.leaving = {slot: (row, ticks - 1) for slot, (row, ticks) in self.leaving.items() if ticks > 1}
        self.coming = {slot: (row, ticks - 1) for slot, (row, ticks) in self.coming.items() if ticks > 1}
        return [row for _, row in out]
