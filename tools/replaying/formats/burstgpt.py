"""BurstGPT: arrival times and lengths as CSV. Rows without response tokens failed when they were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, csv_rows, seconds, whole
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import TraceRow

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


class BurstGPT:
    name = "burstgpt"
    about = "CSV: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type[, Session ID]"
    times = "seconds"

    def sniff(self, head: Head) -> bool:
        return all(column in head.line for column in COLUMNS)

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        return csv_rows(source, COLUMNS, lambda record: _row(record, faults), faults)


def _row(record: Mapping[str, str], faults: Faults) -> TraceRow | None:
    prompt, reply = whole(record, "Request tokens"), whole(record, "Response tokens")
    if not prompt or not reply:
        faults.skip("failed in the trace (no response tokens)" if prompt else "no prompt tokens")
        return None
    return TraceRow(
        session_id=record.get("Session ID", ""),
        timestamp=seconds(record["Timestamp"], "Timestamp"),
        input_length=prompt,
        output_length=reply,
        meta={"model": record["Model"]} if record.get("Model") else {},
    )
