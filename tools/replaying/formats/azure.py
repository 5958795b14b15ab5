"""Azure's LLM inference traces of 2023 and 2024: absolute times and lengths as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, csv_rows, moment_ms, whole
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Azure:
    name = "azure"
    about = "CSV: TIMESTAMP, ContextTokens, GeneratedTokens"
    times = "dates; UTC where they name no zone"

    def sniff(self, head: Head) -> bool:
        return all(column in head.line for column in COLUMNS)

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        return csv_rows(source, COLUMNS, lambda record: _row(record, faults), faults)


def _row(record: Mapping[str, str], faults: Faults) -> TraceRow | None:
    prompt, reply = whole(record, "ContextTokens"), whole(record, "GeneratedTokens")
    if not prompt or not reply:
        faults.skip("no response tokens" if prompt else "no prompt tokens")
        return None
    return TraceRow(timestamp=moment_ms(record["TIMESTAMP"], "TIMESTAMP"), input_length=prompt, output_length=reply)
