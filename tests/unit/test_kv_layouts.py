"""Sizes and addresses of every layout against numbers worked out by hand."""

from __future__ import annotations

import pytest

from epicycle.kvstore.errors import GeometryRefused, LayoutRefused
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import LAYOUTS, build_layout

OURO = KvGeometry(
    layers=24,
    first_recurrent=0,
    recurrent_layers=24,
    loops=4,
    kv_heads=16,
    head_dim=128,
    element_bytes=2,
    page_tokens=16,
)
HUGINN = KvGeometry(
    layers=8, first_recurrent=2, recurrent_layers=4, loops=32, kv_heads=55, head_dim=96, element_bytes=2, page_tokens=16
)
NANBEIGE = KvGeometry(
    layers=22,
    first_recurrent=0,
    recurrent_layers=22,
    loops=2,
    kv_heads=4,
    head_dim=256,
    element_bytes=2,
    page_tokens=16,
)


def with_page_tokens(geometry: KvGeometry, page_tokens: int) -> KvGeometry:
    return KvGeometry(
        **{name: getattr(geometry, name) for name in geometry.__struct_fields__} | {"page_tokens": page_tokens}
    )


@pytest.mark.parametrize(
    ("geometry", "packed", "slots", "live", "page_bytes", "bytes_per_token"),
    [
        (OURO, True, 96, 96, 12_582_912, 786_432),
        (OURO, False, 96, 96, 12_582_912, 786_432),
        (HUGINN, True, 132, 132, 44_605_440, 2_787_840),
        (HUGINN, False, 256, 132, 86_507_520, 5_406_720),
        (NANBEIGE, True, 44, 44, 2_883_584, 180_224),
    ],
)
def test_sizes_of_the_published_models(
    geometry: KvGeometry, packed: bool, slots: int, live: int, page_bytes: int, bytes_per_token: int
) -> None:
    layout = build_layout("last_exited", geometry, packed=packed)
    assert slots == layout.slots_per_page
    assert live == layout.live_slots_per_page
    assert page_bytes == layout.page_bytes
    assert bytes_per_token == layout.bytes_per_token


@pytest.mark.parametrize(("geometry", "cell_bytes"), [(OURO, 8_192), (HUGINN, 21_120), (NANBEIGE, 4_096)])
def test_one_cell_is_the_k_and_v_of_one_token_in_one_layer(geometry: KvGeometry, cell_bytes: int) -> None:
    assert cell_bytes == geometry.cell_bytes
    assert 16 * cell_bytes == geometry.slot_bytes


@pytest.mark.parametrize(
    ("kv_layout", "geometry", "packed", "tokens"),
    [
        ("last_exited", OURO, True, 163_840),
        ("shared", OURO, True, 655_360),
        ("last_exited", HUGINN, False, 23_824),
        ("last_exited", HUGINN, True, 46_208),
    ],
)
def test_tokens_that_120_gib_hold(kv_layout: str, geometry: KvGeometry, packed: bool, tokens: int) -> None:
    layout = build_layout(kv_layout, geometry, packed=packed)
    assert tokens == (120 << 30) // layout.page_bytes * geometry.page_tokens


def test_shared_ouro_needs_a_quarter() -> None:
    assert 196_608 == build_layout("shared", OURO).bytes_per_token
    assert 393_216 == build_layout("budgeted:2", OURO).bytes_per_token


@pytest.mark.parametrize(
    ("geometry", "page", "plane", "layer", "slot"),
    [
        (HUGINN, 0, 0, 0, 0),
        (HUGINN, 0, 0, 7, 7),
        (HUGINN, 0, 1, 2, 8),
        (HUGINN, 0, 1, 5, 11),
        (HUGINN, 0, 31, 5, 131),
        (HUGINN, 1, 0, 0, 132),
        (HUGINN, 3, 2, 4, 410),
        (OURO, 0, 1, 0, 24),
        (OURO, 2, 3, 23, 287),
    ],
)
def test_slot_exact_addresses(geometry: KvGeometry, page: int, plane: int, layer: int, slot: int) -> None:
    layout = build_layout("last_exited", geometry)
    assert slot == layout.slot(page, plane, layer)
    assert slot == layout.view_row(page, plane) + layer


def test_rectangular_addresses_leave_room_for_every_layer_in_every_plane() -> None:
    layout = build_layout("last_exited", HUGINN, packed=False)
    assert 3 * 256 + 2 * 8 + 4 == layout.slot(3, 2, 4)


def test_the_last_element_of_a_large_pool_lies_beyond_32_bits() -> None:
    layout = build_layout("last_exited", HUGINN)
    elements_per_slot = 16 * 55 * 96
    last = layout.slot(2_887, 31, 5) * elements_per_slot
    assert 32_205_043_200 == last
    assert last > 2**31


def test_facts_carry_the_terms_of_the_address() -> None:
    facts = build_layout("last_exited", HUGINN).facts
    assert (0, 8, 12, 128) == (facts.starts[0], facts.starts[1], facts.starts[2], facts.starts[31])
    assert (0, *([2] * 31)) == facts.firsts
    assert (32, 8, 16, 132) == (facts.planes, facts.layers, facts.page_tokens, facts.slots_per_page)
    assert (44_605_440, 2_787_840) == (facts.page_bytes, facts.bytes_per_token)
    assert not facts.serial_prompts


def test_packed_deep_planes_have_no_slot_for_layers_that_run_once() -> None:
    packed = build_layout("last_exited", HUGINN)
    assert [2, 3, 4, 5] == [layer for layer in range(8) if packed.has_slot(1, layer)]
    assert list(range(8)) == [layer for layer in range(8) if packed.has_slot(0, layer)]
    with pytest.raises(AssertionError):
        packed.slot(0, 1, 7)


def test_an_address_follows_the_page_table_and_keeps_once_layers_in_plane_0() -> None:
    layout = build_layout("last_exited", HUGINN)
    assert (5 * 132 + 8 + 1, 3) == layout.address([9, 5], 19, 1, 3)
    assert (9 * 132 + 7, 15) == layout.address([9, 5], 15, 31, 7)


@pytest.mark.parametrize(
    ("kv_layout", "exited", "max_loops", "planes"),
    [
        ("last_exited", 0, 4, [1, 2, 3]),
        ("last_exited", 1, 4, [2, 3]),
        ("last_exited", 3, 4, []),
        ("last_exited", 1, 3, [2]),
        ("shared", 0, 4, []),
        ("budgeted:3", 0, 4, [1, 2]),
        ("budgeted:3", 1, 4, [2]),
        ("budgeted:3", 2, 4, []),
        ("budgeted:3", 3, 4, []),
        ("budgeted:3", 0, 2, [1]),
    ],
)
def test_an_exit_fills_the_planes_it_never_wrote(
    kv_layout: str, exited: int, max_loops: int, planes: list[int]
) -> None:
    assert planes == list(build_layout(kv_layout, OURO).fill_planes(exited, max_loops))


def test_exit_fill_traffic_of_the_published_models() -> None:
    ouro, huginn = build_layout("last_exited", OURO), build_layout("last_exited", HUGINN)
    assert 393_216 == len(ouro.fill_planes(1, 4)) * 24 * OURO.cell_bytes
    assert 2_027_520 == len(huginn.fill_planes(7, 32)) * 4 * HUGINN.cell_bytes


def test_versions_a_later_query_reads() -> None:
    versions = {
        kv_layout: [build_layout(kv_layout, OURO).read_version(depth, 2) for depth in range(4)]
        for kv_layout in ("last_exited", "shared", "budgeted:2", "budgeted:4")
    }
    assert versions == {
        "last_exited": [0, 1, 2, 2],
        "shared": [2, 2, 2, 2],
        "budgeted:2": [2, 1, 2, 1],
        "budgeted:4": [0, 1, 2, 2],
    }


@pytest.mark.parametrize(
    ("kv_layout", "serial"), [("last_exited", False), ("shared", True), ("budgeted:3", True), ("budgeted:4", False)]
)
def test_prompts_are_serial_where_a_plane_is_overwritten(kv_layout: str, serial: bool) -> None:
    assert serial == build_layout(kv_layout, OURO).facts.serial_prompts


def test_shared_as_a_budget_of_one_has_the_same_addresses() -> None:
    shared, budgeted = build_layout("shared", HUGINN), build_layout("budgeted:1", HUGINN)
    assert shared.facts.starts == budgeted.facts.starts
    assert shared.page_bytes == budgeted.page_bytes == 8 * 16 * 21_120


@pytest.mark.parametrize(
    "kv_layout", ["budgeted", "budgeted:", "budgeted:0", "budgeted:5", "budgeted:-1", "budgeted:x"]
)
def test_a_plane_budget_outside_the_loops_is_refused(kv_layout: str) -> None:
    with pytest.raises(LayoutRefused, match="from 1 to 4") as refusal:
        build_layout(kv_layout, OURO)
    assert "kv_layout_refused" == refusal.value.code


@pytest.mark.parametrize("kv_layout", ["", "first_exited", "shared:2", "last_exited:"])
def test_an_unknown_layout_is_refused_with_the_known_ones(kv_layout: str) -> None:
    with pytest.raises(LayoutRefused, match="last_exited, shared or budgeted:K"):
        build_layout(kv_layout, OURO)
    assert ["last_exited", "shared", "budgeted"] == list(LAYOUTS)


@pytest.mark.parametrize("geometry", [OURO, HUGINN, NANBEIGE])
def test_pages_of_256_tokens_are_refused(geometry: KvGeometry) -> None:
    with pytest.raises(GeometryRefused, match="page_tokens is 256; the limit is 128"):
        with_page_tokens(geometry, 256)


def test_a_page_of_more_bytes_than_the_limit_is_refused_and_smaller_ones_are_not() -> None:
    assert 50_331_648 == build_layout("last_exited", with_page_tokens(OURO, 64)).page_bytes
    with pytest.raises(LayoutRefused, match="178421760 bytes in kv_layout last_exited; the limit is 134217728"):
        build_layout("last_exited", with_page_tokens(HUGINN, 64))


@pytest.mark.parametrize("name", ["layers", "recurrent_layers", "loops", "kv_heads", "head_dim", "page_tokens"])
def test_a_geometry_without_something_is_refused(name: str) -> None:
    values = {field: getattr(OURO, field) for field in OURO.__struct_fields__}
    with pytest.raises(GeometryRefused, match=f"{name} is 0; it must be at least 1"):
        KvGeometry(**values | {name: 0})


def test_recurrent_layers_outside_the_model_are_refused() -> None:
    values = {field: getattr(OURO, field) for field in OURO.__struct_fields__}
    with pytest.raises(GeometryRefused, match=r"1\.\.24 lie outside the model's 24 layers"):
        KvGeometry(**values | {"first_recurrent": 1})
