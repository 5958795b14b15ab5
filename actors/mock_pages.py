"""What the mock executor's pages hold, as checksums: a prefix hit on a page that holds something else is found at once.

Owns one checksum a page of prompt. It must not know rows, leases or who shares.
"""

from __future__ import annotations

import zlib

from epicycle.transport.wire.columns import I32, unpack
from epicycle.transport.wire.plan import Grow, Join


class MockPages:
    """Contents by page number; a page whose contents nobody may rely on has none."""

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = 4 * page_tokens
        self._contents: dict[int, int] = {}
        self._heads: dict[int, int] = {}  # checksum of the whole prompt by head row
        self._spilled: dict[int, int | None] = {}  # contents by host page
        self._saved: dict[int, tuple[int, int]] = {}  # by host page: whose, and which page of its table

    def join(self, join: Join) -> None:
        """A row takes its pages: those of its prefix hold what its prompt says, the others are its to write."""
        shared = 4 * join.prefix_tokens // self._page_bytes
        pages: list[int] = unpack(I32, join.pages).tolist()
        loaded: list[int] = unpack(I32, join.host_pages).tolist()
        for page, host_page in zip(pages[shared - len(loaded) : shared], loaded, strict=True):
            self._contents[page] = self._spilled[host_page] or 0
        held = [self._contents.get(page) for page in pages[:shared]]
        sums = self._checksums(join)
        assert held == sums[:shared], f"pages {pages[:shared]} don't hold the prompt of {join.rid}"
        if join.head_from >= 0:
            assert (shared, sums[-1]) == (len(sums), self._heads.get(join.head_from)), f"{join.rid} has no head row"
        self._spoil(pages[shared:])

    def grow(self, grow: Grow) -> None:
        self._spoil(unpack(I32, grow.pages).tolist())

    def write(self, join: Join) -> None:
        """The row's prompt is computed."""
        if join.head_to >= 0:
            self._heads[join.head_to] = self._checksums(join)[-1]
        self._contents.update(zip(unpack(I32, join.pages), self._checksums(join), strict=False))

    def spill(self, pages: list[int], host_pages: list[int]) -> None:
        """Cached pages are copied to the host; somebody else takes them next."""
        for page, host_page in zip(pages, host_pages, strict=True):
            assert page in self._contents, f"page {page} holds no prompt"
            self._spilled[host_page] = self._contents[page]

    def save(self, rid: int, host_pages: list[int]) -> None:
        """The pages of a row's table are copied to these."""
        self._saved.update((page, (rid, place)) for place, page in enumerate(host_pages))

    def load(self, join: Join, written_tokens: int, attached: int, host_pages: list[int]) -> None:
        """A row comes back: `attached` pages hold its prompt still, the others are its own from `host_pages`."""
        pages: list[int] = unpack(I32, join.pages).tolist()
        sums = self._checksums(join)
        held = [self._contents.get(page) for page in pages[:attached]]
        assert held == sums[:attached], f"pages {pages[:attached]} don't hold the prompt of {join.rid}"
        copied = [self._saved.get(page) for page in host_pages]
        assert copied == [(join.rid, attached + place) for place in range(len(host_pages))], copied
        live = -(-4 * written_tokens // self._page_bytes)
        assert attached + len(host_pages) == live, f"{join.rid} has {live} pages, {attached} + {len(host_pages)} came"
        self._spoil(pages[attached:])
        if 4 * written_tokens >= len(join.prompt):
            self._contents.update(zip(pages, sums, strict=False))

    def _spoil(self, pages: list[int]) -> None:
        for page in pages:
            self._contents.pop(page, None)

    def _checksums(self, join: Join) -> list[int]:
        """One for each full page: of its tokens, those before it, and the noise."""
        sums: list[int] = []
        value = join.noise_seed % (1 << 32)
        for end in range(self._page_bytes, len(join.prompt) + 1, self._page_bytes):
            value = zlib.crc32(join.prompt[end - self._page_bytes : end], value)
            sums.append(value)
        return sums
