"""Ticks counted by their rows: from the pump, over reports and epochs, to Prometheus."""

from __future__ import annotations

from epicycle.actors.gateway.beat_metrics import beat_families
from epicycle.actors.step_reports import ReportTotals
from epicycle.transport.tick_counters import TickCounters
from epicycle.transport.wire.columns import U64, unpack_list
from epicycle.transport.wire.plan import StepReport


def counted(*rows: int) -> TickCounters:
    counters = TickCounters()
    for count in rows:
        counters.count_tick(count)
    return counters


def report(counters: TickCounters, epoch: int = 1) -> StepReport:
    return StepReport(epoch=epoch, control_epoch=1, plan_seq=0, **counters.report_fields())


def test_a_tick_falls_into_the_first_bucket_that_holds_its_rows() -> None:
    counters = counted(1, 2, 3, 4, 5, 512, 513)

    assert (7, 1 + 2 + 3 + 4 + 5 + 512 + 513) == (counters.ticks, counters.rows_in_ticks)
    assert [1, 1, 2, 1, 0, 0, 0, 0, 0, 1, 1] == unpack_list(U64, report(counters).rows_per_tick)


def test_totals_outlive_an_epoch_and_reports_do_not_add_up() -> None:
    totals = ReportTotals()
    totals.update(report(counted(1)))
    totals.update(report(counted(1, 2)))
    totals.end_epoch()
    totals.update(report(counted(2), epoch=2))

    assert [1, 2] == totals.rows_per_tick()[:2]
    assert 3 == totals.value("ticks")


def test_prometheus_gets_cumulative_buckets() -> None:
    beat = {
        'rows_per_tick_bucket{le="1"}': 2.0,
        'rows_per_tick_bucket{le="2"}': 3.0,
        'rows_per_tick_bucket{le="+Inf"}': 1.0,
    }
    (family,) = [
        one for one in beat_families([beat | {"rows_in_ticks_total": 20.0}], "m") if one.name.endswith("rows_per_tick")
    ]

    shown = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert {
        "1": 2.0,
        "2": 5.0,
        "+Inf": 6.0,
        "epicycle_rows_per_tick_count": 6.0,
        "epicycle_rows_per_tick_sum": 20.0,
    } == shown
