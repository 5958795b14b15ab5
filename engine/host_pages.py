"""Pages outside the device: host memory for rows and prefixes that were taken off it, and the copies there and back.

Owns that memory, pinned where the device is a GPU, and the order of copies: they run one after the other in the order
in which they were asked for, so a host page may be given away as soon as its last copy has been asked for. On a GPU
they have a stream of their own that waits for the work launched before; a few chunks are on their way at a time, events
say when they have arrived, and nobody waits for them. It must not know whose pages they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.errors import TickError
from epicycle.engine.pool import KvPool

CHUNK_BYTES = 64 << 20  # copied between two looks
CHUNKS_IN_FLIGHT = 2


class Copies(Protocol):
    """Copies of whole pages that have been asked for together."""

    def is_complete(self) -> bool:
        """All of them have arrived; never waits."""
        ...


class PageMover(Protocol):
    """Copies pages between a pool and `total_pages` host pages, in the order of the calls."""

    @property
    def total_pages(self) -> int: ...

    def save(self, pages: Sequence[int], host_pages: Sequence[int]) -> Copies:
        """The pool's `pages` to `host_pages`, as everything launched so far leaves them."""
        ...

    def spill(self, pages: Sequence[int], host_pages: Sequence[int]) -> Copies:
        """As `save`, for pages that whatever is launched next may write."""
        ...

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> Copies:
        """`host_pages` to the pool's `pages`, behind everything launched so far."""
        ...

    def advance(self) -> None:
        """Begin further copies if earlier ones have arrived; never waits."""
        ...


class HostPages:
    """Host twin of a pool: K and V, each [pages, S, page_tokens, kv_heads, head_dim]. Memory that nobody writes costs
    nothing on a CPU; pinned memory is taken at once."""

    def __init__(self, pool: KvPool, pages: int) -> None:
        shape = (pages, *pool.pages_of(pool.k).shape[1:])
        is_pinned = pool.device.type == "cuda"
        self.k = torch.empty(shape, dtype=pool.k.dtype, pin_memory=is_pinned)
        self.v = torch.empty(shape, dtype=pool.v.dtype, pin_memory=is_pinned)


class Complete:
    """Meets `Copies`: they were complete when the call returned."""

    def is_complete(self) -> bool:
        return True


class PlainMover:
    """Meets `PageMover` where device and host are one: a copy is complete when it returns."""

    def __init__(self, pool: KvPool, total_pages: int) -> None:
        self.total_pages = total_pages
        self._pool = pool
        self._host = HostPages(pool, total_pages)

    def save(self, pages: Sequence[int], host_pages: Sequence[int]) -> Complete:
        at, to = (torch.tensor(numbers, dtype=torch.int64) for numbers in (pages, host_pages))
        for held, host in self._both():
            host.index_copy_(0, to, held.index_select(0, at))
        return Complete()

    spill = save

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> Complete:
        at, to = (torch.tensor(numbers, dtype=torch.int64) for numbers in (host_pages, pages))
        for held, host in self._both():
            held.index_copy_(0, to, host.index_select(0, at))
        return Complete()

    def advance(self) -> None:
        return

    def _both(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        pool = self._pool
        return (pool.pages_of(pool.k), self._host.k), (pool.pages_of(pool.v), self._host.v)


@dataclass(slots=True)
class _StreamCopies:
    left: int  # pages that have not arrived

    def is_complete(self) -> bool:
        return self.left == 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of the pages of one call, in one direction; `k` and `v` are by pages, the pool's or the staging's."""

    copies: _StreamCopies
    k: Tensor
    v: Tensor
    pages: Sequence[int]
    host_pages: Sequence[int]
    is_save: bool


class StreamMover:
    """Meets `PageMover` on a GPU. A page of K, or of V, is one run of bytes on either side, so it is one copy.

    Spilled pages are first copied to one of `staging_pages` on the device, in stream order, so that whoever writes them
    next needn't wait. Where none of those is free the copy to the host itself is in stream order: right, and slower.
    """

    def __init__(self, pool: KvPool, total_pages: int, staging_pages: int) -> None:
        self.total_pages = total_pages
        self._pool = pool
        self._host = HostPages(pool, total_pages)
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        shape = (staging_pages, *pool.pages_of(pool.k).shape[1:])
        self._staging = pool.k.new_empty(shape), pool.v.new_empty(shape)
        self._free_staging = list(range(staging_pages))
        self._staged: deque[tuple[_StreamCopies, list[int]]] = deque()
        self._chunk_pages = max(1, CHUNK_BYTES // pool.facts.page_bytes)
        self._waiting: deque[_Chunk] = deque()
        self._in_flight: deque[tuple[torch.cuda.Event, _Chunk]] = deque()

    def save(self, pages: Sequence[int], host_pages: Sequence[int]) -> _StreamCopies:
        return self._ask(*self._pool_pages(), pages, host_pages, is_save=True)

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> _StreamCopies:
        return self._ask(*self._pool_pages(), pages, host_pages, is_save=False)

    def spill(self, pages: Sequence[int], host_pages: Sequence[int]) -> _StreamCopies:
        if len(pages) > len(self._free_staging):
            copies = self.save(pages, host_pages)
            while self._waiting:
                self._in_flight.append((self._launch(self._waiting[0]), self._waiting.popleft()))
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)
            return copies
        staged = [self._free_staging.pop() for _ in pages]
        for held, staging in zip(self._pool_pages(), self._staging, strict=True):
            for page, place in zip(pages, staged, strict=True):
                staging[place].copy_(held[page], non_blocking=True)
        copies = self._ask(*self._staging, staged, host_pages, is_save=True)
        self._staged.append((copies, staged))
        return copies

    def _pool_pages(self) -> tuple[Tensor, Tensor]:
        return self._pool.pages_of(self._pool.k), self._pool.pages_of(self._pool.v)

    def _ask(
        self, k: Tensor, v: Tensor, pages: Sequence[int], host_pages: Sequence[int], *, is_save: bool
    ) -> _StreamCopies:
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        copies = _StreamCopies(len(pages))
        for first in range(0, len(pages), self._chunk_pages):
            at = slice(first, first + self._chunk_pages)
            self._waiting.append(_Chunk(copies, k, v, pages[at], host_pages[at], is_save))
        self.advance()
        return copies

    def advance(self) -> None:
        while self._in_flight and self._has_arrived(self._in_flight[0][0]):
            _, chunk = self._in_flight.popleft()
            chunk.copies.left -= len(chunk.pages)
        while self._staged and self._staged[0][0].is_complete():
            self._free_staging += self._staged.popleft()[1]
        while self._waiting and len(self._in_flight) < CHUNKS_IN_FLIGHT:
            chunk = self._waiting.popleft()
            self._in_flight.append((self._launch(chunk), chunk))

    def _has_arrived(self, event: torch.cuda.Event) -> bool:
        try:
            return bool(event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TickError("device_failed", f"the GPU failed in a copy of KV pages: {error}") from error

    def _launch(self, chunk: _Chunk) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for held, host in ((chunk.k, self._host.k), (chunk.v, self._host.v)):
                for page, host_page in zip(chunk.pages, chunk.host_pages, strict=True):
                    if chunk.is_save:
                        host[host_page].copy_(held[page], non_blocking=True)
                    else:
                        held[page].copy_(host[host_page], non_blocking=True)
            event.record(self._stream)
        return event


def make_mover(pool: KvPool, total_pages: int, staging_pages: int) -> PageMover:
    """`staging_pages`: pages that may be on their way in `spill` at once without holding up what is launched next."""
    if pool.device.type != "cuda":
        return PlainMover(pool, total_pages)
    return StreamMover(pool, total_pages, staging_pages)
