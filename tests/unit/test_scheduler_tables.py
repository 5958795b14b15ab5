"""Slots, leases, the pending plan and the arithmetic of reports, each alone."""

from __future__ import annotations

from typing import Any

import pytest

from epicycle.actors.leases import Leases, reserve_rule
from epicycle.actors.mock_model import mock_capabilities
from epicycle.actors.plan_outbox import JOIN_BYTES, PlanOutbox
from epicycle.actors.slot_table import Rank, SlotTable
from epicycle.actors.step_reports import ReportTotals, merge_reports
from epicycle.transport.config import SchedulerConfig
from epicycle.transport.link import Receiver
from epicycle.transport.wire.columns import I32, pack, unpack_list
from epicycle.transport.wire.plan import Evict, Grow, Join, Plan, Reset, StepReport, ToExecutor
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.fabric import FakeFabric
from tests.sim.world import make_config


def join(slot: int, prompt_bytes: int = 4) -> Join:
    return Join(slot + 100, 0, slot, 1, bytes(prompt_bytes), b"", 16, Sampling(max_tokens=1), LoopBounds())


def test_gen_grows_each_time_a_slot_is_given_out() -> None:
    table = SlotTable(2)
    first = table.take(7, 0, 4, 4)
    assert (True, False) == (table.is_current(first, 1), table.is_current(first, 2))
    assert 7 == table.release(first)
    assert not table.is_current(first, 1)
    assert first == table.take(8, 0, 4, 4)
    assert (False, True) == (table.is_current(first, 1), table.is_current(first, 2))


def test_slots_outside_the_table_are_never_current() -> None:
    table = SlotTable(2)
    assert [False, False, False] == [table.is_current(slot, 0) for slot in (-1, 0, 2)]


def test_rows_are_listed_oldest_first_and_found_by_rid() -> None:
    table = SlotTable(3)
    slots = [table.take(rid, 0, 4, 4) for rid in (7, 8, 9)]
    table.release(slots[0])
    newest = table.take(10, 0, 4, 4)
    assert [slots[1], slots[2], newest] == list(table)
    assert (newest, None) == (table.slot_of(10), table.slot_of(7))
    assert (3, 0) == (len(table), table.free_slots)


def test_prefilling_counts_rows_whose_prompt_is_not_written() -> None:
    table = SlotTable(2)
    one, two = table.take(7, 0, 10, 4), table.take(8, 0, 10, 4)
    assert 0 == table.advance([one], [1], [9])
    assert 2 == table.prefilling
    assert 0 == table.advance([one], [1], [10])
    assert 0 == table.advance([one], [1], [11])
    assert 1 == table.prefilling
    table.release(two)
    table.release(one)
    assert 0 == table.prefilling


def test_reports_about_rows_that_are_not_here_are_counted_and_change_nothing() -> None:
    table = SlotTable(2)
    slot = table.take(7, 0, 10, 4)
    assert 4 == table.advance([slot, 1 - slot, -1, 2], [2, 0, 1, 1], [5, 5, 5, 5])
    assert [0, 0] == table.tokens


def make_leases(pages: int, slots: int = 4) -> tuple[SlotTable, Leases]:
    """Pages of 16, low-water mark 4, steps of 16."""
    facts = mock_capabilities(make_config(pages=pages, slots=slots))
    config = SchedulerConfig(reservation="incremental", low_water_tokens=4, grow_tokens=16)
    table = SlotTable(slots)
    return table, Leases(table, reserve_rule(config, facts), pages)


def take(table: SlotTable, leases: Leases, rid: int, pages: int, max_tokens: int = 100) -> int:
    slot = table.take(rid, 0, 16, max_tokens, Rank(0.0, rid, 0))
    leases.open(slot, pages)
    return slot


def report(table: SlotTable, leases: Leases, slot: int, tokens: int) -> None:
    assert 0 == table.advance([slot], [table.gens[slot]], [tokens])
    leases.note([slot])


def test_lease_grows_below_its_low_water_mark_only() -> None:
    table, leases = make_leases(16)
    slot = take(table, leases, 7, 2)
    report(table, leases, slot, 28)
    assert [] == leases.serve()
    report(table, leases, slot, 29)
    [grow] = leases.serve()
    assert ([2, 3], 64, False) == (unpack_list(I32, grow.pages), grow.limit_tokens, grow.is_final)
    assert [] == leases.serve()


def test_dry_pool_lets_the_lowest_yield_once_and_the_highest_grow_from_its_pages() -> None:
    table, leases = make_leases(6)
    old, young = take(table, leases, 7, 3), take(table, leases, 8, 3)
    report(table, leases, young, 30)
    assert not leases.is_dry
    report(table, leases, old, 45)
    assert ([], True) == (leases.serve(), leases.is_dry)
    final = leases.yield_lowest()
    assert (young, True, 30) == (final.slot, final.is_final, final.limit_tokens)
    assert ([], False) == (leases.serve(), leases.is_dry)  # its pages are on their way back: nobody else has to yield
    table.release(young)
    leases.close(young)
    [grow] = leases.serve()
    assert (old, False, 80) == (grow.slot, grow.is_final, grow.limit_tokens)
    assert leases.census().is_even


def test_lowest_that_only_needs_pages_itself_uses_up_what_it_has() -> None:
    table, leases = make_leases(6)
    take(table, leases, 7, 3)
    young = take(table, leases, 8, 3)
    report(table, leases, young, 45)
    final = leases.yield_lowest()
    assert (young, True, 48) == (final.slot, final.is_final, final.limit_tokens)


def test_part_of_a_step_is_better_than_none() -> None:
    table, leases = make_leases(4)
    slot = take(table, leases, 7, 3, max_tokens=49)
    report(table, leases, slot, 46)
    [grow] = leases.serve()
    assert 64 == grow.limit_tokens
    assert 0 == leases.free_pages


def test_newcomers_leave_a_step_for_every_row_that_grows() -> None:
    table, leases = make_leases(10)
    assert 10 == leases.spare_pages
    take(table, leases, 7, 2)
    assert 7 == leases.spare_pages
    take(table, leases, 8, 2, max_tokens=17)  # whole already
    assert 5 == leases.spare_pages


def make_outbox() -> tuple[FakeFabric, Receiver[Any], PlanOutbox]:
    fabric = FakeFabric()
    receiver = fabric.bind("ex0", 1, "plan", ToExecutor)
    return fabric, receiver, PlanOutbox(fabric.connect(receiver.address), epoch=1, control_epoch=3)


def test_reset_comes_before_the_first_plan_and_only_once() -> None:
    _, receiver, outbox = make_outbox()
    outbox.join(join(0))
    assert [join(0)] == outbox.flush()
    outbox.evict(Evict(0, 1))
    outbox.flush()
    assert [
        Reset(1, 3),
        Plan(1, 1, joins=[join(0)], control_epoch=3),
        Plan(1, 2, evicts=[Evict(0, 1)], control_epoch=3),
    ] == receiver.drain()


def test_refused_plan_stays_and_merges_with_growth_of_the_same_row() -> None:
    fabric, receiver, outbox = make_outbox()
    outbox.flush()
    fabric.blocked.add(receiver.address)
    outbox.grow(Grow(0, 1, pack(I32, [4]), 32))
    assert [] == outbox.flush()
    outbox.grow(Grow(0, 1, pack(I32, [5]), 48))
    outbox.grow(Grow(1, 1, pack(I32, [6]), 32))
    fabric.blocked.clear()
    outbox.flush()
    [_, plan] = receiver.drain()
    assert [Grow(0, 1, pack(I32, [4, 5]), 48), Grow(1, 1, pack(I32, [6]), 32)] == plan.grows
    assert (1, 2, False) == (outbox.plans, outbox.merges, outbox.has_pending)


def test_eviction_makes_pending_growth_pointless() -> None:
    _, receiver, outbox = make_outbox()
    outbox.grow(Grow(0, 1, pack(I32, [4]), 32))
    outbox.evict(Evict(0, 1))
    outbox.flush()
    [_, plan] = receiver.drain()
    assert ([], [Evict(0, 1)]) == (plan.grows, plan.evicts)


def test_long_prompts_are_spread_over_several_plans() -> None:
    _, receiver, outbox = make_outbox()
    for slot in range(3):
        outbox.join(join(slot, JOIN_BYTES // 2))
    assert 3 == len(outbox.flush())
    assert [2, 1] == [len(plan.joins) for plan in receiver.drain()[1:]]


def columns(report: StepReport) -> list[list[int]]:
    names = ("slots", "gens", "tokens", "freed_slots", "freed_gens")
    return [unpack_list(I32, getattr(report, name)) for name in names]


def test_merged_reports_keep_the_latest_counts_and_every_freed_slot() -> None:
    one = StepReport(
        1, 1, 4, pack(I32, [0, 1]), pack(I32, [1, 1]), pack(I32, [5, 6]), pack(I32, [2]), pack(I32, [9]), ticks=1
    )
    two = StepReport(
        1, 1, 5, pack(I32, [1, 3]), pack(I32, [1, 2]), pack(I32, [7, 8]), pack(I32, [0]), pack(I32, [1]), ticks=2
    )
    merged = merge_reports(one, two)
    assert [[0, 1, 3], [1, 1, 2], [5, 7, 8], [2, 0], [9, 1]] == columns(merged)
    assert (5, 2) == (merged.plan_seq, merged.ticks)


@pytest.mark.parametrize("stale", [StepReport(1, 1, 4, ticks=9), StepReport(2, 0, 4, ticks=9)])
def test_report_from_before_a_reset_is_not_merged(stale: StepReport) -> None:
    new = StepReport(2, 1, 0, ticks=1)
    assert new == merge_reports(stale, new)


def test_totals_keep_growing_over_epochs() -> None:
    totals = ReportTotals()
    totals.update(StepReport(1, 1, 1, ticks=5))
    totals.update(StepReport(1, 1, 2, ticks=8))
    totals.end_epoch()
    assert 8 == totals.value("ticks")
    totals.update(StepReport(2, 1, 1, ticks=3))
    assert 11 == totals.value("ticks")
