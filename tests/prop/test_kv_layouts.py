"""Properties that hold for every layout of every small geometry."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import LAYOUTS, KvLayout, build_layout
from epicycle.kvstore.reserve import ReserveRule, lifetime_pages, pages_for

PACE = settings(max_examples=150, deadline=None)


@st.composite
def geometries(draw: st.DrawFn) -> KvGeometry:
    once_before, recurrent, once_after = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    return KvGeometry(
        layers=once_before + recurrent + once_after,
        first_recurrent=once_before,
        recurrent_layers=recurrent,
        loops=draw(st.integers(1, 6)),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 8)),
        element_bytes=draw(st.sampled_from([2, 4])),
        page_tokens=draw(st.integers(1, 5)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    geometry = draw(geometries())
    name = draw(st.sampled_from(list(LAYOUTS)))
    spec = f"budgeted:{draw(st.integers(1, geometry.loops))}" if name == "budgeted" else name
    return build_layout(spec, geometry, packed=draw(st.booleans()))


@PACE
@given(layouts(), st.integers(1, 4))
def test_no_two_cells_collide_and_packed_pages_have_no_holes(layout: KvLayout, pages: int) -> None:
    cells = [
        (page, plane, layer)
        for page in range(pages)
        for plane in range(layout.planes)
        for layer in range(layout.geometry.layers)
        if layout.has_slot(plane, layer)
    ]
    slots = [layout.slot(*cell) for cell in cells]
    assert list(range(pages * layout.slots_per_page)) == sorted(slots)
    assert [page for page, _, _ in cells] == [slot // layout.slots_per_page for slot in slots]


@PACE
@given(layouts())
def test_a_page_holds_exactly_its_bytes(layout: KvLayout) -> None:
    geometry = layout.geometry
    assert layout.slots_per_page * geometry.slot_bytes == layout.page_bytes
    assert layout.bytes_per_token * geometry.page_tokens == layout.page_bytes
    assert layout.live_slots_per_page <= layout.slots_per_page
    if layout.is_packed:
        assert layout.live_slots_per_page == layout.slots_per_page


@PACE
@given(layouts(), st.integers(0, 2**40))
def test_the_shifted_view_row_is_never_negative_and_finds_the_slot(layout: KvLayout, page: int) -> None:
    facts = layout.facts
    for plane in range(facts.planes):
        row = layout.view_row(page, plane)
        assert row >= 0
        assert page * facts.slots_per_page + facts.starts[plane] - facts.firsts[plane] == row
        for layer in range(facts.layers):
            if layout.has_slot(plane, layer):
                assert layout.slot(page, plane, layer) == row + layer


@PACE
@given(layouts(), st.data())
def test_every_executed_cell_has_one_address_shared_only_by_loops_of_one_plane(
    layout: KvLayout, data: st.DataObject
) -> None:
    geometry = layout.geometry
    tokens = data.draw(st.integers(1, 12))
    table = data.draw(st.permutations(range(pages_for(tokens, geometry.page_tokens))))
    owners: dict[tuple[int, int], tuple[int, int, int]] = {}
    for position in range(tokens):
        for depth in range(geometry.loops):
            for layer in range(geometry.layers):
                plane = layout.plane(depth) if geometry.is_recurrent(layer) else 0
                cell = (position, plane, layer)
                assert cell == owners.setdefault(layout.address(table, position, depth, layer), cell)
    assert tokens * layout.live_slots_per_page == len(owners)


@PACE
@given(layouts(), st.data())
def test_read_version_is_what_writing_and_filling_leaves_in_the_plane(layout: KvLayout, data: st.DataObject) -> None:
    max_loops = data.draw(st.integers(1, layout.geometry.loops))
    exited = data.draw(st.integers(0, max_loops - 1))
    planes: dict[int, int] = {layout.plane(depth): depth for depth in range(exited + 1)}
    fills = layout.fill_planes(exited, max_loops)
    assert not planes.keys() & set(fills)
    planes |= dict.fromkeys(fills, planes[layout.plane(exited)])
    assert [planes[layout.plane(depth)] for depth in range(max_loops)] == [
        layout.read_version(depth, exited) for depth in range(max_loops)
    ]


@PACE
@given(geometries(), st.booleans())
def test_last_exited_reads_the_smaller_depth_and_shared_the_exit(geometry: KvGeometry, packed: bool) -> None:
    last_exited, shared = (build_layout(name, geometry, packed=packed) for name in ("last_exited", "shared"))
    for depth in range(geometry.loops):
        for exited in range(geometry.loops):
            assert min(depth, exited) == last_exited.read_version(depth, exited)
            assert exited == shared.read_version(depth, exited)


@PACE
@given(layouts())
def test_a_parallel_prompt_never_overwrites_a_plane(layout: KvLayout) -> None:
    planes = [layout.plane(depth) for depth in range(layout.geometry.loops)]
    assert layout.serial_prompts == (len(set(planes)) < len(planes))


@PACE
@given(geometries())
def test_packing_changes_addresses_and_nothing_else(geometry: KvGeometry) -> None:
    packed, rectangular = (build_layout("last_exited", geometry, packed=packed) for packed in (True, False))
    assert packed.live_slots_per_page == rectangular.live_slots_per_page
    for depth in range(geometry.loops):
        assert packed.plane(depth) == rectangular.plane(depth)
        assert packed.fill_planes(depth, geometry.loops) == rectangular.fill_planes(depth, geometry.loops)
    if geometry.recurrent_layers == geometry.layers:
        assert packed.facts.starts == rectangular.facts.starts


@PACE
@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(1, 20),
)
def test_growth_keeps_a_row_above_the_mark_until_its_whole_life_is_held(
    prompt: int, max_tokens: int, page_tokens: int, grow: int | None, low_water: int
) -> None:
    rule = ReserveRule(page_tokens=page_tokens, grow_tokens=grow, low_water_tokens=low_water)
    whole = lifetime_pages(prompt, max_tokens, page_tokens)
    held = rule.first_pages(prompt, max_tokens)
    for written in range(prompt, prompt + max_tokens):
        held += rule.growth_pages(written, held, prompt, max_tokens)
        assert held == whole or held * page_tokens - written >= low_water
        assert 0 == rule.growth_pages(written, held, prompt, max_tokens)
        assert pages_for(written, page_tokens) <= held <= whole
    if grow is None:
        assert whole == rule.first_pages(prompt, max_tokens)
