"""The server's trace file: recorded exit depths by trace id, read and checked once at start.

Two forms: a JSON object of lists, or the native trace rows that `epicycle serve --record` writes, whose request ids are
the trace ids then. What can be wrong whatever the model is refused here; whether a trace fits the model and a request
is judged with that request (loops.py), and `unfit` counts for the log what no request can follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from epicycle.transport.config import ConfigError
from epicycle.transport.trace_rows import TraceRowError, decode_row

MOST_LOOPS = (1 << 16) - 1  # depths travel as U16

Traces = dict[str, list[int]]


def load_traces(path: str) -> Traces:
    """Raises ConfigError that names the file, the trace and the depth at fault. An empty path has no traces."""
    if not path:
        return {}
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"server.trace_file {path}: {error.strerror}") from error
    traces = _from_object(content) if _is_object(content) else _from_rows(path, content.splitlines())
    if traces is None:
        text = "it must be a JSON object of lists of depths, or native trace rows with exit_depths"
        raise ConfigError(f"server.trace_file {path}: {text}")
    for name, depths in traces.items():
        _check(path, name, depths)
    return traces


def unfit(traces: Traces, loops: int) -> list[str]:
    """The ids of traces that a model of `loops` loops can't follow whatever a request says."""
    return [name for name, depths in traces.items() if depths[0] != loops or max(depths) > loops]


def _is_object(content: bytes) -> bool:
    """Whether this is no row: a first line that is a row has fields that are no lists."""
    try:
        first = msgspec.json.decode(content.lstrip().partition(b"\n")[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True  # an object over several lines
    return not isinstance(first, dict) or all(isinstance(value, list) for value in first.values())


def _from_object(content: bytes) -> Traces | None:
    try:
        return msgspec.json.decode(content, type=Traces)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _from_rows(path: str, lines: Iterable[bytes]) -> Traces:
    """Rows without depths or id are no traces."""
    traces: Traces = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decode_row(line)
        except TraceRowError as error:
            field = f" ({error.field})" if error.field else ""
            raise ConfigError(f"server.trace_file {path}: line {number}: {error}{field}") from None
        if row.request_id and row.exit_depths is not None:
            traces[row.request_id] = row.exit_depths
    return traces


def _check(path: str, name: str, depths: list[int]) -> None:
    if not depths:
        raise ConfigError(f"server.trace_file {path}: trace {name!r} has no depths")
    if min(depths) < 1 or max(depths) > MOST_LOOPS:
        at = next(at for at, depth in enumerate(depths) if not 1 <= depth <= MOST_LOOPS)
        text = f"trace {name!r} has depth {depths[at]} at {at}, must be between 1 and {MOST_LOOPS}"
        raise ConfigError(f"server.trace_file {path}: {text}")
