"""Rows that are off the device for a while: on their way out, away, and on their way back.

A row leaves once every tick that was launched with it has been harvested, so that the host's account of it is exact;
then its columns and the pages that hold anything are copied, and only when they have arrived are slot and pages free.
On the way back the row waits in its slot until its pages have arrived. Nobody waits for a copy. Owns the saved rows; it
must not know leases, messages, or why a row was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from epicycle.engine.host_pages import Copies, PageMover
from epicycle.engine.route import Resident
from epicycle.engine.saved_rows import SavedColumns, restore_columns, save_columns
from epicycle.engine.slots import SlotTable
from epicycle.kvstore.reserve import pages_for


@dataclass(slots=True)
class _Leaving:
    """A row on its way out; `copies` begin after `after_ticks` ticks."""

    resident: Resident
    host_pages: Sequence[int]
    after_ticks: int
    columns: SavedColumns | None = None
    copies: Copies | None = None


@dataclass(frozen=True, slots=True)
class SavedRow:
    resident: Resident
    columns: SavedColumns


class Shelf:
    """For one pump. Rows are known by their requests' rids while they are away."""

    def __init__(self, slots: SlotTable, mover: PageMover, page_tokens: int) -> None:
        self._slots = slots
        self._mover = mover
        self._page_tokens = page_tokens
        self._leaving: dict[int, _Leaving] = {}  # by rid
        self._away: dict[int, SavedRow] = {}
        self._coming: dict[int, tuple[Resident, Copies]] = {}
        self._spills: deque[tuple[Copies, int]] = deque()  # with how many pages each

    @property
    def is_busy(self) -> bool:
        """Somebody is on the way."""
        return bool(self._leaving or self._coming or self._spills)

    def clear(self) -> None:
        """Forget everybody. Copies on their way go on and nobody looks at them."""
        self._leaving, self._away, self._coming = {}, {}, {}
        self._spills.clear()

    def spill(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Cached pages that somebody else is about to write."""
        self._spills.append((self._mover.spill(pages, host_pages), len(pages)))

    def spilled(self) -> int:
        """Pages of which the copies have arrived since the last call."""
        pages = 0
        while self._spills and self._spills[0][0].is_complete():
            pages += self._spills.popleft()[1]
        return pages

    def bring_in(self, resident: Resident, host_pages: Sequence[int], first_page: int) -> None:
        """A new row some of whose prompt lies on the host: it runs once its pages from `first_page` on are filled."""
        resident.is_parked = True
        pages = resident.pages[first_page : first_page + len(host_pages)]
        self._coming[resident.join.rid] = resident, self._mover.load(host_pages, pages)

    def park(self, resident: Resident, host_pages: Sequence[int], after_ticks: int) -> None:
        """The row runs no more; save it once so many ticks have been harvested. It may be on its way back still."""
        resident.is_parked = True
        self._coming.pop(resident.join.rid, None)  # copies out come after those that bring it back
        self._leaving[resident.join.rid] = _Leaving(resident, host_pages, after_ticks)

    def advance(self, harvested: int) -> tuple[list[Resident], list[Resident]]:
        """Go on with whoever is on the way: (rows that are saved now, rows that may run again now)."""
        self._mover.advance()
        for leaving in self._leaving.values():
            if leaving.copies is None and leaving.after_ticks <= harvested:
                self._copy_out(leaving)
        saved = [leaving for leaving in self._leaving.values() if leaving.copies and leaving.copies.is_complete()]
        for leaving in saved:
            assert leaving.columns is not None
            self._away[leaving.resident.join.rid] = SavedRow(leaving.resident, leaving.columns)
            del self._leaving[leaving.resident.join.rid]
        back = [resident for resident, copies in self._coming.values() if copies.is_complete()]
        for resident in back:
            resident.is_parked = False
            del self._coming[resident.join.rid]
        return [leaving.resident for leaving in saved], back

    def _copy_out(self, leaving: _Leaving) -> None:
        resident = leaving.resident
        live = pages_for(resident.begun_tokens, self._page_tokens)
        leaving.columns = save_columns(self._slots, resident.slot, penalises=resident.params.penalises)
        leaving.copies = self._mover.save(resident.pages[:live], leaving.host_pages[:live])

    def take(self, rid: int) -> SavedRow | None:
        """A saved row, from here on the caller's; None where there is none."""
        return self._away.pop(rid, None)

    def bring_back(self, row: SavedRow, host_pages: Sequence[int], attached_pages: int) -> None:
        """The row has a slot and pages again, `attached_pages` of which hold what they should already."""
        resident = row.resident
        resident.is_parked = True
        restore_columns(self._slots, resident.slot, row.columns, is_decoding=resident.is_decoding)
        pages = resident.pages[attached_pages : attached_pages + len(host_pages)]
        self._coming[resident.join.rid] = resident, self._mover.load(host_pages, pages)

    def abandon(self, resident: Resident) -> Copies | None:
        """The row ends while it is on the way. Copies that still write its pages, None where there are none."""
        self._leaving.pop(resident.join.rid, None)
        _, copies = self._coming.pop(resident.join.rid, (None, None))
        return copies
