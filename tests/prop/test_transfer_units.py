"""Whatever the layout, the prompt and the two page tables: every byte is sent once, and both limits hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epicycle.engine.transfer.blocks import Blocks, BlockShape, block_shape
from epicycle.engine.transfer.coverage import Coverage
from epicycle.engine.transfer.units import HEAD, Cut, Place, Unit, pairs, runs_of, segments, take_units, units_of
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import KvLayout, build_layout
from epicycle.transport.wire.transfer import Arrived, Commit

HEAD_BYTES = 24
GAP = 1 << 40  # between one tensor's address and the next one's


@dataclass(frozen=True)
class Case:
    layout: KvLayout
    cut: Cut
    here: Place
    there: Place


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    recurrent, before, after = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    loops = draw(st.integers(1, 4))
    geometry = KvGeometry(
        layers=before + recurrent + after,
        first_recurrent=before,
        recurrent_layers=recurrent,
        loops=loops,
        kv_heads=draw(st.integers(1, 2)),
        head_dim=2,
        element_bytes=draw(st.sampled_from((2, 4))),
        page_tokens=draw(st.integers(1, 4)),
    )
    name = draw(st.sampled_from(("last_exited", "shared", f"budgeted:{draw(st.integers(1, loops))}")))
    return build_layout(name, geometry, packed=draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts())
    shape = block_shape(layout.facts, layout.geometry, HEAD_BYTES)
    tokens = draw(st.integers(1, 5 * shape.page_tokens))
    first = draw(st.integers(0, (tokens - 1) // shape.page_tokens))
    cut = Cut(shape, first, tokens)
    here = place_of(draw, shape, 0, cut.end_page, 1 << 50)
    return Case(layout, cut, here, place_of(draw, shape, first, cut.end_page - first, 1 << 55))


def place_of(draw: st.DrawFn, shape: BlockShape, first: int, needed: int, base: int) -> Place:
    pages = draw(st.integers(needed, needed + 4))
    size = pages * shape.slots_per_page * shape.slot_bytes
    blocks = Blocks(shape, (base, size), (base + GAP, size), (base + 2 * GAP, 3 * HEAD_BYTES))
    return Place(blocks, first, draw(st.permutations(range(pages)))[:needed], draw(st.integers(0, 2)))


def bytes_moved(case: Case, units: list[Unit]) -> list[tuple[int, int]]:
    """(address here, address there) of every byte of `units`, from the merged segments."""
    source, target = pairs(case.cut, units, case.here, case.there)
    found = segments(source, target, case.here.blocks, case.there.blocks)
    return [
        (int(start) + byte, int(to) + byte) for start, to, size in zip(*found, strict=True) for byte in range(int(size))
    ]


def bytes_expected(case: Case) -> set[tuple[int, int]]:
    """The same of the whole transfer, cell by cell from the layout's own addresses."""
    layout, cut, expected = case.layout, case.cut, set()
    half, page_tokens = layout.geometry.cell_bytes // 2, layout.geometry.page_tokens
    for position in range(cut.first_page * page_tokens, cut.prompt_tokens):
        page, offset = divmod(position, page_tokens)
        for depth in range(layout.geometry.loops):
            for layer in range(layout.geometry.layers):
                plane = layout.plane(depth) if layout.geometry.is_recurrent(layer) else 0
                here = (layout.slot(case.here.page(page), plane, layer) * page_tokens + offset) * half
                there = (layout.slot(case.there.page(page), plane, layer) * page_tokens + offset) * half
                for tensor in (0, GAP):
                    expected |= {((1 << 50) + tensor + here + n, (1 << 55) + tensor + there + n) for n in range(half)}
    for byte in range(HEAD_BYTES):
        rows = case.here.head_row * HEAD_BYTES + byte, case.there.head_row * HEAD_BYTES + byte
        expected.add(((1 << 50) + 2 * GAP + rows[0], (1 << 55) + 2 * GAP + rows[1]))
    return expected


@given(case=cases())
def test_every_byte_travels_once(case: Case) -> None:
    moved = bytes_moved(case, sorted(case.cut.units()))
    assert len(set(moved)) == len(moved)
    assert bytes_expected(case) == set(moved)
    assert case.cut.bytes == len(moved)


@given(case=cases(), data=st.data())
def test_writes_keep_the_limit_and_lose_nothing(case: Case, data: st.DataObject) -> None:
    largest = max(map(case.cut.bytes_of, case.cut.units()))
    limit = data.draw(st.integers(largest, 4 * largest))
    coverage, waiting, parts, moved = Coverage(case.cut), case.cut.units(), 0, 0
    while waiting:
        before = len(waiting)
        units = take_units(case.cut, waiting, limit)
        size = len(bytes_moved(case, units))
        assert 0 < size <= limit
        assert before - len(units) == len(waiting)
        coverage.mark(Arrived(1, parts, runs_of(units)))
        parts, moved = parts + 1, moved + size
    assert coverage.is_complete(Commit(1, parts, moved))
    assert case.cut.bytes == coverage.bytes


@given(units=st.sets(st.tuples(st.integers(0, 9), st.integers(HEAD, 3))))
def test_runs_name_the_units(units: set[Unit]) -> None:
    assert sorted(units) == sorted(units_of(runs_of(units)))


@given(case=cases())
def test_segments_are_as_few_as_both_sides_allow(case: Case) -> None:
    source, target = pairs(case.cut, case.cut.units(), case.here, case.there)
    start, to, size = segments(source, target, case.here.blocks, case.there.blocks)
    ends_here = set(zip((start + size).tolist(), (to + size).tolist(), strict=True))
    assert not ends_here & set(zip(start.tolist(), to.tolist(), strict=True))


def test_pages_in_order_on_both_sides_are_one_segment_of_k_and_one_of_v() -> None:
    geometry = KvGeometry(
        layers=3, first_recurrent=1, recurrent_layers=1, loops=4, kv_heads=1, head_dim=2, element_bytes=4, page_tokens=4
    )
    layout = build_layout("last_exited", geometry)
    shape = block_shape(layout.facts, geometry, HEAD_BYTES)
    size = 8 * shape.slots_per_page * shape.slot_bytes
    here, there = (
        Place(Blocks(shape, (base, size), (base + GAP, size), (base + 2 * GAP, HEAD_BYTES)), 0, pages, 0)
        for base, pages in ((1 << 50, range(2, 6)), (1 << 55, range(3, 7)))
    )
    source, target = pairs(Cut(shape, 0, 16), Cut(shape, 0, 16).units() - {(0, HEAD)}, here, there)
    assert 2 * 4 * 4 == len(source)
    assert 2 == len(segments(source, target, here.blocks, there.blocks)[0])
    assert np.all(np.diff(here.blocks.spans(source)[0]) > 0)
