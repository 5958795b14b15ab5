"""The accounts of copies on a GPU's copy stream, with streams and events that only pretend: chunks, order, staging."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from epicycle.engine import host_pages
from epicycle.engine.host_pages import StreamMover
from epicycle.engine.pool import KvPool
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout

LOOKS = 3  # before a copy has arrived


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeEvent:
    def __init__(self) -> None:
        self.looks = 0

    def record(self, stream: FakeStream) -> None:
        pass

    def query(self) -> bool:
        self.looks += 1
        return self.looks > LOOKS


@pytest.fixture
def pool() -> KvPool:
    geometry = KvGeometry(
        layers=2, first_recurrent=0, recurrent_layers=2, loops=2, kv_heads=1, head_dim=2, element_bytes=4, page_tokens=4
    )
    pool = KvPool(build_layout("last_exited", geometry), 24, torch.float32, torch.device("cpu"))
    pool.k.normal_()
    pool.v.normal_()
    return pool


@pytest.fixture
def make(pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], StreamMover]]:
    """Movers with so many staging pages; a chunk is two pages."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(host_pages, "CHUNK_BYTES", 2 * pool.facts.page_bytes)
    yield lambda staging: StreamMover(pool, 16, staging)


def looks_until_complete(mover: StreamMover, copies: host_pages.Copies) -> int:
    for looks in range(100):
        if copies.is_complete():
            return looks
        mover.advance()
    raise AssertionError("never complete")


def test_pages_travel_there_and_back_in_chunks(pool: KvPool, make: Callable[[int], StreamMover]) -> None:
    mover, pages = make(0), [3, 9, 1, 7, 5]
    expected = [pool.pages_of(held)[pages].clone() for held in (pool.k, pool.v)]
    saved = mover.save(pages, [4, 0, 2, 8, 6])
    assert not saved.is_complete()
    assert 2 == len(mover._in_flight), "chunks on their way at once"
    looks_until_complete(mover, saved)
    loaded = mover.load([4, 0, 2, 8, 6], [10, 11, 12, 13, 14])
    assert looks_until_complete(mover, loaded) > LOOKS
    for held, wanted in zip((pool.k, pool.v), expected, strict=True):
        assert torch.equal(wanted, pool.pages_of(held)[10:15])


def test_spilled_pages_may_be_written_before_they_have_arrived(
    pool: KvPool, make: Callable[[int], StreamMover]
) -> None:
    mover = make(4)
    expected = pool.pages_of(pool.k)[[2, 3, 4, 5]].clone()
    busy = mover.save([20, 21, 22, 23], [12, 13, 14, 15])  # two chunks: the spill's copies wait behind them
    spilled = mover.spill([2, 3, 4, 5], [0, 1, 2, 3])
    pool.k.fill_(float("nan"))
    assert not mover._free_staging
    looks_until_complete(mover, spilled)
    assert busy.is_complete()
    assert 4 == len(mover._free_staging)
    looks_until_complete(mover, mover.load([0, 1, 2, 3], [6, 7, 8, 9]))
    assert torch.equal(expected, pool.pages_of(pool.k)[6:10])


def test_where_nothing_is_free_to_stage_the_copy_is_made_at_once(
    pool: KvPool, make: Callable[[int], StreamMover]
) -> None:
    mover = make(1)
    expected = pool.pages_of(pool.v)[[2, 3, 4]].clone()
    spilled = mover.spill([2, 3, 4], [5, 6, 7])
    pool.v.fill_(float("nan"))
    looks_until_complete(mover, spilled)
    assert 1 == len(mover._free_staging)
    looks_until_complete(mover, mover.load([5, 6, 7], [0, 1, 2]))
    assert torch.equal(expected, pool.pages_of(pool.v)[:3])
