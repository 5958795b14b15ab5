"""What control tells of serving with every beat: counters and gauges by the names of /metrics, without their prefix.

Pure reading of the actors. Where there is to be one executor its series have no label `executor`; of several each has,
also before it is up.
"""

from __future__ import annotations

from collections.abc import Collection

from epicycle.actors.admission import Admission
from epicycle.actors.kv import KvActor
from epicycle.actors.scheduler import Scheduler
from epicycle.actors.unit import Unit, UnitTotals
from epicycle.transport.wire.plan import ROWS_PER_TICK_BOUNDS


def counters(
    admission: Admission, scheduler: Scheduler, kv: KvActor, refused_verdicts: int, configured: Collection[str]
) -> dict[str, float]:
    """`configured` names the executors that there are to be."""
    units = {unit.name: unit for unit in scheduler.units}
    names = sorted({*scheduler.totals, *configured})
    found: dict[str, float] = {
        'requests_waiting{reason="capacity"}': admission.waiting,
        'stale_messages_total{actor="control"}': admission.stale_messages + scheduler.stale_messages,
        'send_again_total{link="verdicts"}': refused_verdicts,
        "uneven_census_total": kv.uneven_censuses,
    }
    transfers = scheduler.transfers
    found |= {f'transfer_failures_total{{code="{code}"}}': n for code, n in transfers.failures.items()}
    if transfers.opened:
        found |= {"transfers_total": transfers.opened, "transfers_in_flight": transfers.in_flight}
    found |= {f'rejections_total{{code="{code}"}}': n for code, n in admission.rejections.items()}
    for name in names:
        totals, unit = scheduler.totals.get(name, UnitTotals()), units.get(name)
        evicted = {
            "prefix_evicted_pages_total": totals.evicted_pages + (unit.leases.evicted_pages if unit else 0),
            "prefix_spilled_pages_total": totals.spilled_pages + (unit.leases.spilled_pages if unit else 0),
        }
        for key, value in (_of_totals(totals) | evicted | _of_unit(unit) | _of_pool(name, unit, kv)).items():
            found[_labelled(key, name) if len(names) > 1 else key] = value
    return found


def _of_totals(totals: UnitTotals) -> dict[str, float]:
    total = totals.reports.value
    found: dict[str, float] = {
        "prompt_tokens_total": total("prompt_tokens"),
        "generation_tokens_total": total("generated_tokens"),
        "ticks_total": total("ticks"),
        "rows_in_ticks_total": total("rows_in_ticks"),
        "mixed_depth_ticks_total": total("mixed_depth_ticks"),
        'core_row_loops_total{kind="decode"}': total("decode_row_loops"),
        'core_row_loops_total{kind="prompt"}': total("prompt_row_loops"),
        "loops_saved_total": total("loops_saved"),
        'starved_total{kind="latency"}': total("starved_latency"),
        'starved_total{kind="pool"}': total("starved_pool"),
        "yielded_rows_total": totals.yielded_rows,
        "preemptions_total": totals.preemption.preemptions,
        "resumes_total": totals.preemption.resumes,
        "preemption_refusals_total": totals.preemption.refusals,
        "prefix_query_tokens_total": totals.prefix_query_tokens,
        "prefix_hit_tokens_total": totals.prefix_hit_tokens,
        "prefix_host_hit_tokens_total": totals.host_hit_tokens,
        'stale_messages_total{actor="pump"}': total("stale_messages"),
    }
    bounds = (*ROWS_PER_TICK_BOUNDS, "+Inf")
    counts = zip(bounds, totals.reports.rows_per_tick(), strict=True)
    return found | {f'rows_per_tick_bucket{{le="{bound}"}}': count for bound, count in counts}


def _of_unit(unit: Unit | None) -> dict[str, float]:
    """Of the present epoch; nothing runs on an executor that is away."""
    return {
        "requests_running": unit.running if unit else 0,
        'requests_waiting{reason="prefill"}': unit.table.prefilling if unit else 0,
        'requests_waiting{reason="preempted"}': len(unit.preemption) if unit else 0,
        "session_pinned_pages": unit.leases.pinned_pages if unit else 0,
        "plans_total": unit.plans.plans if unit else 0,
        "merged_plan_changes_total": unit.plans.merges if unit else 0,
    }


def _of_pool(name: str, unit: Unit | None, kv: KvActor) -> dict[str, float]:
    if unit is None:
        return kv.gauges(name, 0, 0, 0)
    leases = unit.leases
    free, total = unit.preemption.host_pages
    host: dict[str, float] = {'host_pages{state="free"}': free, 'host_pages{state="saved"}': total - free}
    host['host_pages{state="prefix"}'] = leases.host_prefix_pages
    host |= {f'kv_plan{{term="{term}"}}': value for term, value in unit.plan_terms.items()}
    return host | kv.gauges(name, leases.free_pages, leases.total_pages, leases.prefix_pages)


def _labelled(key: str, executor: str) -> str:
    """`a{b="c"}` with the executor as its first label."""
    name, brace, labels = key.partition("{")
    return f'{name}{{executor="{executor}"' + (f",{labels}" if brace else "}")
