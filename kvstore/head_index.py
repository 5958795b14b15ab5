"""Head rows by prompt: in which row of the executor's memory lies what the first token after a whole prompt is sampled
from.

A key is that of the prompt's last page, so it stands for every token before it and all that decides bits. Rows are
written by whoever computes such a prompt, and the least recently used gives way. Owns which row is whose; must not know
pages, requests, or what a row holds.
"""

from __future__ import annotations

from collections import OrderedDict


class HeadIndex:
    """Rows first .. first + count - 1."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # written; the next to give way first
        self._pending: dict[bytes, int] = {}

    def find(self, key: bytes) -> int | None:
        """The row of a prompt, which counts as used now."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def keep(self, key: bytes) -> int | None:
        """A row for a prompt that is about to be computed; None where it has one, or every row is being written."""
        if key in self._rows or key in self._pending:
            return None
        if not self._free and self._rows:
            self._free.append(self._rows.popitem(last=False)[1])
        if not self._free:
            return None
        row = self._pending[key] = self._free.pop()
        return row

    def settle(self, key: bytes, *, is_written: bool) -> None:
        """Whoever was to write the row of `key` has done so, or never will."""
        row = self._pending.pop(key, None)
        if row is None:
            return
        if is_written:
            self._rows[key] = row
        else:
            self._free.append(row)

    def reset(self) -> None:
        """Forget every written row; those being written stay their writers'."""
        self._free += self._rows.values()
        self._rows.clear()
