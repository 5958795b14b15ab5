"""One run: trace, target and options put together, and the summary of what came of it."""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epicycle.tools import bench_facts
from epicycle.tools.local_server import local_server
from epicycle.tools.replaying.drive import Target, drive
from epicycle.tools.replaying.errors import Faults, ReplayError
from epicycle.tools.replaying.figures import Figures, Slo
from epicycle.tools.replaying.http_target import HttpTarget
from epicycle.tools.replaying.observed import Observed, RequestRecord
from epicycle.tools.replaying.progress import progress_bar
from epicycle.tools.replaying.prompts import BodyOptions, Prompts
from epicycle.tools.replaying.record import RecordFile
from epicycle.tools.replaying.report import Timeline, render
from epicycle.tools.replaying.schedule import Schedule
from epicycle.tools.replaying.timing import Timing
from epicycle.tools.replaying.trace import TraceRows
from epicycle.tools.replaying.zmq_target import ZmqTarget


@dataclass(kw_only=True)
class Plan:
    """A run but for its target."""

    trace: TraceRows
    faults: Faults
    timing: Timing
    bodies: BodyOptions
    concurrency: int
    stops_sessions: bool
    read_ahead: int
    model: str = ""
    vocabulary: int = 0
    slo: Slo
    max_lag_ms: float
    out: Path | None = None
    report: Path | None = None
    shows_progress: bool = False


@contextmanager
def target_at(
    address: str | None, plan: Plan, timeout_s: float, api_key: str = "", speaks: str = "auto"
) -> Iterator[HttpTarget | ZmqTarget]:
    """The target at `address`; without one, a server of our own for a workload, as `epicycle bench` starts it."""
    if not address:
        if not plan.trace.serve:
            raise ReplayError("where to? name a server with --target")
        with (
            tempfile.TemporaryDirectory(prefix="epicycle-replay-") as scratch,
            local_server(Path(scratch), plan.trace.serve) as server,
        ):
            yield HttpTarget(server.base_url, timeout_s=timeout_s)
    elif address.startswith("zmq://"):
        yield ZmqTarget(address, api_key=api_key, timeout_s=timeout_s)
    elif address.startswith(("http://", "https://")):
        yield HttpTarget(address, api_key=api_key, timeout_s=timeout_s, speaks=speaks)
    else:
        raise ReplayError(f"target {address!r} begins with neither http:// nor zmq://")


async def replay(plan: Plan, target: HttpTarget | ZmqTarget) -> dict[str, Any]:
    """Run it; returns the summary, after the report is written. Raises ReplayError."""
    async with target:
        return await run(plan, target)


async def run(plan: Plan, target: Target) -> dict[str, Any]:
    """As `replay`, on a target that is open. Cancelled, it sends no more and sums up what has ended."""
    facts = await target.facts(plan.model)
    schedule = Schedule(
        plan.trace.rows,
        plan.timing,
        plan.faults,
        concurrency=plan.concurrency,
        stops_sessions=plan.stops_sessions,
        read_ahead=plan.read_ahead,
    )
    prompts = Prompts(plan.bodies, facts, plan.vocabulary)
    figures, spans = Figures(plan.slo), Timeline()
    before = await target.counters()
    is_interrupted = False
    with RecordFile(plan.out) as file, progress_bar(is_wanted=plan.shows_progress) as bar:

        def take(record: RequestRecord, seen: Observed | None) -> None:
            figures.add(record, seen)
            spans.add(record)
            file.write(record)
            bar.show(figures, schedule)

        try:
            await drive(schedule, prompts, target, take)
        except asyncio.CancelledError:  # Ctrl-C: what has ended is worth its summary
            is_interrupted = True
    after = await target.counters()
    summary = _summary(plan, figures, prompts, schedule, is_interrupted=is_interrupted)
    summary["target"] = {"name": target.name, **asdict(facts)}
    summary["counters"] = {name: after[name] - before.get(name, 0.0) for name in after}
    if plan.report is not None:
        _write(plan.report, render(summary, figures, spans))
    return summary


def _summary(
    plan: Plan, figures: Figures, prompts: Prompts, schedule: Schedule, *, is_interrupted: bool
) -> dict[str, Any]:
    warnings = _warnings(plan, figures)
    if is_interrupted:
        warnings.append(f"interrupted with {schedule.sent} requests in flight")
    return {
        "replay": plan.trace.name,
        "is_interrupted": is_interrupted,
        "is_valid": not warnings,
        "warnings": warnings,
        **figures.summary(),
        "rows": {
            "read": schedule.rows_read,
            "left_out": dict(plan.faults.skipped),
            "first_faults": plan.faults.texts,
            "limits": dict(prompts.touched),
        },
        "trace": plan.trace.about(),
        "schedule": asdict(plan.timing) | {"concurrency": plan.concurrency, "stops_sessions": plan.stops_sessions},
        "bodies": asdict(plan.bodies),
        "commit": bench_facts.commit(),
        "versions": bench_facts.versions(),
        "host": platform.node(),
    }


def _warnings(plan: Plan, figures: Figures) -> list[str]:
    """Why the figures can't be taken at their word."""
    found = []
    lag_ms = figures.values["lag_ms"].cuts().get("p99", 0.0)
    if lag_ms > plan.max_lag_ms:
        text = f"p99 schedule lag {lag_ms:.0f} ms is above {plan.max_lag_ms:g} (--max-lag-ms)"
        found.append(f"{text}: the client was the bottleneck")
    if figures.outcomes and not figures.outcomes["ok"]:
        found.append("no request succeeded")
    return found


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror} (--report)") from None
