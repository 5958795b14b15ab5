"""The pump's side of transfers: which rows' prompts come from another executor, or go to one.

Owns the table of such rows by transfer, until the port says that the transfer has ended, and says to the port which
units of a prompt a tick completes. It must not know what a transfer's messages are, nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from epicycle.engine.route import Chunk, Resident
from epicycle.engine.transfer.events import Event, Failed, Landed
from epicycle.engine.transfer.outgoing import Ready
from epicycle.engine.transfer.port import TransferPort
from epicycle.engine.transfer.units import HEAD, Unit
from epicycle.kvstore.reserve import pages_for


class Handover:
    """Without a port there are no transfers, and Joins that name one are a mistake of control's."""

    def __init__(self, port: TransferPort | None, page_tokens: int) -> None:
        self._port = port
        self._page_tokens = page_tokens
        self._rows: dict[int, Resident] = {}  # by transfer
        self._gone: set[int] = set()  # of those, rows that have left

    @property
    def has_news(self) -> bool:
        return self._port is not None and self._port.has_news

    def expect(self, resident: Resident, fence: Ready) -> None:
        """D: the row waits for its prompt behind what it has in whole pages."""
        part = resident.join.imports
        assert self._port is not None and part is not None, "an import needs a transfer port (transfer.connector)"
        self._rows[part.transfer] = resident
        first = resident.join.prefix_tokens // self._page_tokens
        pages = resident.pages[first : pages_for(resident.prompt_tokens, self._page_tokens)]
        self._port.expect(part, resident.prompt_tokens, first * self._page_tokens, pages, resident.head_from, fence)

    def offer(self, resident: Resident, fence: Ready) -> None:
        """P: the row's prompt goes out; what it found in the prefix cache may go once `fence` is passed."""
        port, part = self._port, resident.join.exports
        assert port is not None and part is not None, "an export needs a transfer port (transfer.connector)"
        self._rows[part.transfer] = resident
        pages = resident.pages[: pages_for(resident.prompt_tokens, self._page_tokens)]
        port.offer(part, resident.prompt_tokens, pages, resident.head_to)
        cached = resident.written_tokens // self._page_tokens
        if cached:
            port.written(part.transfer, [(page, plane) for page in range(cached) for plane in port.planes], fence)

    def launched(self, chunks: Iterable[Chunk], loops: int, ready: Ready) -> None:
        """A tick has taken `chunks` one loop further: their new depth says what it leaves complete once `ready`."""
        for chunk in chunks:
            part = chunk.resident.join.exports
            if part is None or self._port is None:
                continue
            planes, pages = self._port.done_after(chunk.depth), self._complete_pages(chunk)
            units: list[Unit] = [(page, plane) for page in pages for plane in planes]
            if chunk.depth == loops and chunk.ends_prompt:
                units.append((0, HEAD))
            if units:
                self._port.written(part.transfer, units, ready)

    def awaits(self, resident: Resident) -> bool:
        """Whether its prompt is still to come from another executor."""
        part = resident.join.imports
        return part is not None and self._rows.get(part.transfer) is resident

    def leave(self, resident: Resident) -> bool:
        """The row has gone. True where a transfer may still touch its pages: `take` will say when that is over."""
        part = resident.join.imports or resident.join.exports
        if part is None or self._rows.get(part.transfer) is not resident:
            return False
        assert self._port is not None
        self._gone.add(part.transfer)
        self._port.stop(part.transfer)
        return True

    def take(self) -> list[tuple[Event, Resident]]:
        """What has happened to rows that are known here."""
        if self._port is None:
            return []
        found: list[tuple[Event, Resident]] = []
        for event in self._port.take():
            resident = self._rows.get(event.transfer)
            if resident is None or (isinstance(event, Landed) and event.transfer in self._gone):
                continue  # of a row that has left only its end matters
            found.append((event, resident))
            if not isinstance(event, Failed):
                del self._rows[event.transfer]
                self._gone.discard(event.transfer)
        return found

    def reset(self) -> None:
        self._rows.clear()
        self._gone.clear()
        if self._port is not None:
            self._port.reset()

    def _complete_pages(self, chunk: Chunk) -> range:
        """Pages of the prompt whose last token is in the chunk."""
        until = pages_for(chunk.end, self._page_tokens) if chunk.ends_prompt else chunk.end // self._page_tokens
        return range(chunk.first // self._page_tokens, until)
