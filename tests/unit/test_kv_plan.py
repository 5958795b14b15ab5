"""The pool plan against two tables of worked examples: 512-row pages with a large cache, and looped-model pages."""

from __future__ import annotations

from typing import Any

import pytest

from epicycle.kvstore.errors import PlanRefused
from epicycle.kvstore.plan import GIB, MIB, PoolRequest, plan_pool

OURO_PAGE, HUGINN_PAGE = 12_582_912, 44_605_440


def ask(**changes: Any) -> PoolRequest:
    """Ouro, 8 slots, 120 GiB, unless changed."""
    base: dict[str, Any] = {
        "room_bytes": 120 * GIB,
        "page_bytes": OURO_PAGE,
        "page_tokens": 16,
        "context_limit_tokens": 65_536,
        "slots": 8,
        "fixed_bytes": MIB,
        "cache_bytes": 16 * GIB,
    }
    return PoolRequest(**base | changes)


@pytest.mark.parametrize(
    ("most_windows", "context", "slots", "fixed_mib", "room_gib", "windows", "held_gib", "cache_gib", "live", "rows"),
    [
        (1, 1_048_576, 8, 180, 15.6, 1, 0.04, 1.57, 2_056, 1_052_672),
        (None, 1_048_576, 8, 180, 15.8, 1, 0.04, 1.77, 2_056, 1_052_672),
        (1, 262_144, 8, 180, 16.2, 1, 0.04, 11.73, 520, 266_240),
        (None, 262_144, 8, 180, 16.1, 4, 9.58, 2.09, 2_052, 1_050_624),
        (None, 131_072, 4, 180, 16.2, 4, 4.80, 9.27, 1_028, 526_336),
        (1, 131_072, 4, 180, 9.5, 1, 0.02, 7.35, 260, 133_120),
        (None, 131_072, 4, 180, 9.5, 4, 4.80, 2.57, 1_028, 526_336),
        (1, 1_048_576, 8, 162, 38, 1, 0.04, 16.0, 3_355, 1_717_760),
        (None, 1_048_576, 8, 162, 38, 2, 12.76, 11.38, 4_098, 2_098_176),
    ],
)
def test_long_windows_of_512_row_pages(
    most_windows: int | None,
    context: int,
    slots: int,
    fixed_mib: int,
    room_gib: float,
    windows: int,
    held_gib: float,
    cache_gib: float,
    live: int,
    rows: int,
) -> None:
    plan = plan_pool(
        ask(
            room_bytes=int(room_gib * GIB),
            page_bytes=512 * 13_056,
            page_tokens=512,
            context_limit_tokens=context + 1,  # these windows hold one page more than the context
            slots=slots,
            fixed_bytes=fixed_mib * MIB,
            most_windows=most_windows,
        )
    )
    assert windows == plan.windows
    assert held_gib == round(plan.held_bytes / GIB, 2)
    assert cache_gib == round(plan.cache_bytes / GIB, 2)
    assert (live, rows) == (plan.live_pages, plan.live_pages * 512)


@pytest.mark.parametrize(
    ("page", "context", "slots", "room_gib", "windows", "held", "left", "cache", "live"),
    [
        (OURO_PAGE, 65_536, 8, 120, 2, 51_539_607_552, 77_302_071_296, 17_179_869_184, 8_874),
        (OURO_PAGE, 32_768, 64, 120, 4, 77_309_411_328, 103_013_154_816, 17_179_869_184, 8_869),
        (OURO_PAGE, 4_096, 64, 120, 39, 122_406_567_936, 125_561_733_120, 3_155_165_184, 9_984),
        (OURO_PAGE, 65_536, 8, 49, 1, 88_080_384, 1_066_401_792, 978_321_408, 4_103),
        (HUGINN_PAGE, 4_096, 64, 120, 11, 114_189_926_400, 117_363_965_952, 3_174_039_552, 2_816),
        (HUGINN_PAGE, 4_096, 8, 20, 1, 312_238_080, 10_048_503_808, 9_736_265_728, 263),
    ],
)
def test_windows_of_looped_models(
    page: int, context: int, slots: int, room_gib: int, windows: int, held: int, left: int, cache: int, live: int
) -> None:
    plan = plan_pool(ask(page_bytes=page, context_limit_tokens=context, slots=slots, room_bytes=room_gib * GIB))
    assert (windows, held, left, cache, live) == (
        plan.windows,
        plan.held_bytes,
        plan.left_bytes,
        plan.cache_bytes,
        plan.live_pages,
    )


def test_a_window_that_the_room_does_not_hold_is_refused_with_every_number() -> None:
    with pytest.raises(PlanRefused) as refusal:
        plan_pool(ask(room_bytes=40 * GIB, slots_may_shrink=True))
    assert (
        "8 slots of 65,536 tokens need one window of 48.00 GiB, 0.09 GiB for 7 further slots: 48.09 GiB, and "
        "40.00 GiB are left for KV: lower context_tokens or slots, or raise kv_memory_bytes" == str(refusal.value)
    )
    assert "kv_plan_refused" == refusal.value.code


def test_without_a_cache_every_byte_goes_to_live_pages() -> None:
    plan = plan_pool(ask(cache_bytes=0))
    assert (10_239, 0, 10_239) == (plan.live_pages, plan.cache_pages, plan.total_pages)
    assert 0 <= plan.spare_bytes < OURO_PAGE


def test_pages_never_pass_one_window_per_slot() -> None:
    plan = plan_pool(ask(context_limit_tokens=4_096, cache_bytes=0))
    assert 8 * 256 == plan.total_pages
    assert 120 * GIB - 7 * MIB - 8 * 256 * OURO_PAGE == plan.spare_bytes


def test_live_and_cache_pages_share_one_pool_within_the_room() -> None:
    plan = plan_pool(ask())
    assert (8_874, 1_365, 10_239) == (plan.live_pages, plan.cache_pages, plan.total_pages)
    assert plan.pool_bytes + 7 * MIB <= plan.room_bytes


def test_auto_context_is_the_model_limit_where_the_room_funds_it() -> None:
    assert 65_536 == plan_pool(ask(context_is_auto=True)).context_tokens


def test_auto_context_is_the_largest_that_would_not_be_refused() -> None:
    plan = plan_pool(ask(context_is_auto=True, room_bytes=40 * GIB))
    assert 54_480 == plan.context_tokens
    assert 8 == plan.slots
    with pytest.raises(PlanRefused):
        plan_pool(ask(context_limit_tokens=plan.context_tokens + 1, room_bytes=40 * GIB))


def test_auto_context_leaves_what_an_owed_cache_needs() -> None:
    plan = plan_pool(ask(context_is_auto=True, room_bytes=40 * GIB, cache_may_shrink=False))
    assert 16 * GIB == plan.cache_bytes
    with pytest.raises(PlanRefused):
        plan_pool(ask(context_limit_tokens=plan.context_tokens + 1, room_bytes=40 * GIB, cache_may_shrink=False))


def test_an_explicit_slot_count_is_refused_where_auto_serves_fewer() -> None:
    tight = {"room_bytes": 48 * GIB + 3 * (OURO_PAGE + MIB), "slots": 64}
    with pytest.raises(PlanRefused, match=r"64 slots of 65,536 tokens need .* 48\.80 GiB, and 48\.04 GiB are left"):
        plan_pool(ask(**tight))
    plan = plan_pool(ask(**tight, slots_may_shrink=True))
    assert (4, 64, 4_099) == (plan.slots, plan.asked_slots, plan.live_pages)
    assert "kv pool: 4 slots (64 asked) x 65,536 tokens" in plan.line()


def test_each_slot_is_promised_a_whole_prompt_chunk() -> None:
    chunked = ask(context_limit_tokens=65_536, room_bytes=50 * GIB, run_pages=32)
    with pytest.raises(PlanRefused, match=r"2\.63 GiB for 7 further slots"):
        plan_pool(chunked)
    assert 7 * 32 * OURO_PAGE == plan_pool(ask(room_bytes=51 * GIB, run_pages=32)).held_bytes


def test_an_explicit_cache_is_refused_where_windows_need_its_bytes() -> None:
    with pytest.raises(PlanRefused, match=r"a cache of 40\.00 GiB beside 8 slots and 2 windows of 48\.00 GiB: 23\.99"):
        plan_pool(ask(cache_bytes=40 * GIB, cache_may_shrink=False))
    plan = plan_pool(ask(cache_bytes=40 * GIB, cache_may_shrink=False, most_windows=1))
    assert 40 * GIB == plan.cache_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 0),
        ("page_bytes", 0),
        ("room_bytes", -1),
        ("context_limit_tokens", 0),
        ("run_pages", 0),
        ("most_windows", 0),
    ],
)
def test_numbers_below_their_least_are_refused(field: str, value: int) -> None:
    with pytest.raises(PlanRefused, match=f"{field} is {value}; it must be at least"):
        ask(**{field: value})


def test_the_start_up_line_carries_every_term() -> None:
    plan = plan_pool(ask())
    assert (
        "kv pool: 8 slots x 65,536 tokens of context, 10,239 pages of 16 tokens and 12.00 MiB = 119.99 GiB in "
        "120.00 GiB of room; a window is 4,096 pages = 48.00 GiB, 2 funded, 2.17 fit; fixed 1.00 MiB a slot, left "
        "71.99 GiB, held 48.00 GiB, cache reserve 16.00 GiB = 1,365 pages, spare 0.00 GiB" == plan.line()
    )


def test_slot_exact_pages_hold_twice_what_rectangular_blocks_did() -> None:
    """24,165 blocks of 16 tokens in 8 layers: 12,080 Huginn tokens with a block for every plane, 22,736 where deeper
    planes are packed into whole blocks."""
    room = 24_165 * 8 * 16 * 21_120
    plan = plan_pool(
        ask(room_bytes=room, page_bytes=HUGINN_PAGE, context_limit_tokens=4_096, fixed_bytes=0, cache_bytes=0)
    )
    assert 23_424 == plan.total_pages * plan.page_tokens


def test_the_terms_for_machines_are_those_of_the_line() -> None:
    plan = plan_pool(ask())
    terms = plan.terms()
    assert (plan.room_bytes, plan.windows, plan.total_pages) == (
        terms["room_bytes"],
        terms["windows"],
        terms["total_pages"],
    )
    assert plan.window_pages * plan.page_bytes == terms["window_bytes"]
    assert terms["pool_bytes"] + terms["spare_bytes"] == terms["room_bytes"] - 7 * MIB
