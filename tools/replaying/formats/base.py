"""What a trace format is, and the reading that formats share: lines to records to rows, with faults where they are.

A format is one file: records as structs, a function from record to row, a line in `registry.py`. It must not know
schedules or servers.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.source import Line, Source
from epicycle.transport.trace_rows import LATEST_MS, LONGEST_TOKENS, TraceRow, TraceRowError, check_row, decoded

R = TypeVar("R")
Make = Callable[[R], TraceRow | None]  # None: the record is left out, and was counted
WHOLE = re.compile(r"\d{1,18}(\.0+)?")


class Numbered(NamedTuple):
    """A row and the line it came from."""

    line: int
    row: TraceRow


class Head(NamedTuple):
    """What sniffing may look at: the first line as text, its JSON object (empty if it has none), the first byte."""

    line: str
    fields: Mapping[str, Any]
    first: str


class Format(Protocol):
    """`times` says what the file's times are taken for; reports repeat it."""

    name: str
    about: str
    times: str

    def sniff(self, head: Head) -> bool:
        """Whether a file that begins so is of this format. Asked in the registry's order."""
        ...

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        """Rows in the file's order, one at a time. Raises TraceError where `faults` doesn't count instead."""
        ...


def json_rows(source: Source, kind: type[R], make: Make[R], faults: Faults) -> Iterator[Numbered]:
    """One record a line."""
    decode = msgspec.json.Decoder(kind).decode

    def row_of(line: Line) -> TraceRow | None:
        return make(_decoded(decode, line, source))

    for line in source.lines():
        found = _one(source, line.number, faults, partial(row_of, line))
        if found is not None:
            yield Numbered(line.number, found)


def json_objects(source: Source, kind: type[R], faults: Faults) -> Iterator[tuple[int, R]]:
    """Records that make several rows each: lines of JSON, one JSON list, or one JSON document."""
    first = source.head().removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[":
        found = source.elements()
    elif _is_lines(source):
        found = source.lines()
    else:
        found = iter([source.document()])
    decode = msgspec.json.Decoder(kind).decode
    for line in found:
        try:
            yield line.number, _decoded(decode, line, source)
        except TraceRowError as error:
            faults.bad(TraceError(str(error), path=source.name, line=line.number, field=error.field))


def _is_lines(source: Source) -> bool:
    """Whether the first line is JSON by itself."""
    line = next(source.lines(), None)
    if line is None or not line.is_whole:
        return True
    try:
        msgspec.json.decode(line.content)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def csv_rows(
    source: Source, columns: tuple[str, ...], make: Make[Mapping[str, str]], faults: Faults
) -> Iterator[Numbered]:
    """One record a line under a header that must name `columns`; further ones are let through."""
    lines = source.lines()
    names = _header(next(lines, Line(1, b"")), columns, source)

    def row_of(line: Line) -> TraceRow | None:
        return make(_record(names, line, source))

    for line in lines:
        found = _one(source, line.number, faults, partial(row_of, line))
        if found is not None:
            yield Numbered(line.number, found)


def _header(line: Line, columns: tuple[str, ...], source: Source) -> list[str]:
    """Without it nothing can be read, whatever is done about bad rows. Raises TraceError."""
    try:
        names = _cells(line, source)
    except TraceRowError as error:
        raise TraceError(str(error), path=source.name, line=line.number) from None
    missing = [name for name in columns if name not in names]
    if missing:
        raise TraceError("the header lacks this column", path=source.name, line=line.number, field=missing[0])
    return names


def _record(names: list[str], line: Line, source: Source) -> dict[str, str]:
    cells = _cells(line, source)
    if len(cells) != len(names):
        raise TraceRowError(f"{len(cells)} cells under {len(names)} columns")
    return dict(zip(names, cells, strict=True))


def _cells(line: Line, source: Source) -> list[str]:
    _whole(line, source)
    try:
        return [cell.strip() for cell in next(csv.reader([line.content.decode()], strict=True), [])]
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceRowError(f"no valid CSV: {error}") from None


def _decoded(decode: Callable[[bytes], R], line: Line, source: Source) -> R:
    """Raises TraceRowError."""
    _whole(line, source)
    return decoded(decode, line.content)


def _whole(line: Line, source: Source) -> None:
    if not line.is_whole:
        raise TraceRowError(f"the line is longer than {source.limits.line_bytes} bytes (--max-line-mib)")


def _one(source: Source, number: int, faults: Faults, make: Callable[[], TraceRow | None]) -> TraceRow | None:
    """A checked row, or None for one that was counted."""
    try:
        row = make()
        if row is not None:
            check_row(row)
        return row
    except TraceRowError as error:
        faults.bad(TraceError(str(error), path=source.name, line=number, field=error.field))
        return None


def checked(source: Source, number: int, faults: Faults, rows: Iterator[TraceRow]) -> Iterator[Numbered]:
    """Rows that one record made; a fault ends the record."""
    while True:
        row = _one(source, number, faults, lambda: next(rows, None))
        if row is None:
            return
        yield Numbered(number, row)


def whole(record: Mapping[str, str], field: str) -> int:
    """A count of tokens in a cell. Raises TraceRowError."""
    text = record[field]
    if not WHOLE.fullmatch(text):
        raise TraceRowError(f"is {text[:40]!r}, must be a whole number of at least 0", field)
    number = int(text.partition(".")[0])
    if number > LONGEST_TOKENS:
        raise TraceRowError(f"is {number}, above {LONGEST_TOKENS}", field)
    return number


def seconds(text: str, field: str) -> float:
    """A time in seconds, as milliseconds. Raises TraceRowError."""
    try:
        time_ms = 1e3 * float(text)
    except ValueError:
        time_ms = math.nan
    if not 0 <= time_ms <= LATEST_MS:
        raise TraceRowError(f"is {text[:40]!r}, must be seconds of at least 0", field)
    return time_ms


def moment_ms(value: str | float, field: str) -> float:
    """An absolute time: ISO 8601 (UTC where it names no zone), or a number of milliseconds. Raises TraceRowError."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise TraceRowError(f"is {value[:40]!r}, must be an ISO date and time", field) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        value = round(1e3 * moment.timestamp(), 3)
    if not 0 <= value <= LATEST_MS:
        raise TraceRowError(f"is {value}, must be between 0 and {LATEST_MS:g}", field)
    return value
