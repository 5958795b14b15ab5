"""The named workloads of `epicycle bench` as rows of a trace, with the same prompts, so that figures compare.

Streams in flight and bursts become conversations of one row; sessions become conversations whose turns go on with the
live replies.
"""

from __future__ import annotations

from collections.abc import Iterator

from epicycle.tools.bench_load import BenchRequest, Load
from epicycle.tools.bench_workload import Workload
from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.formats.base import Numbered
from epicycle.transport.trace_rows import TraceRow


def workload_rows(load: Load) -> Iterator[Numbered]:
    """The workload's requests in the order of their numbers. Raises ReplayError for loads that aren't rows."""
    workload = load.workload
    if workload.arrivals is not None:
        raise ReplayError(f"{workload.name}: arrivals beside a workload aren't replayed; use epicycle bench")
    return (Numbered(number + 1, row) for number, row in enumerate(_rows(load)))


def concurrency_of(workload: Workload) -> int:
    """Conversations in flight at once; 0: all."""
    return workload.streams if workload.kind == "closed" else 0


def _rows(load: Load) -> Iterator[TraceRow]:
    workload = load.workload
    if workload.kind != "sessions":
        yield from (_row(load.stream(number), "") for number in range(workload.requests))
        return
    for session in range(workload.sessions):
        for turn in range(workload.turns):
            row = _row(load.turn(session, turn, []), f"session {session}")
            row.message_mode = "delta"
            row.tool_wait_ms = workload.tool_ms if turn else 0.0
            yield row


def _row(request: BenchRequest, session: str) -> TraceRow:
    return TraceRow(
        request_id=f"request {request.number}",
        session_id=session,
        token_ids=request.prompt,
        output_length=request.output,
        extra={"exit_threshold": request.threshold} if request.threshold < 1 else {},
        exit_depths=request.depths or None,
    )
