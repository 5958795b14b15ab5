"""Where a run's rows come from: trace files, or a workload of `epicycle bench`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from epicycle.tools.bench_load import Load
from epicycle.tools.bench_workload import WorkloadError, read_workloads
from epicycle.tools.replaying.errors import Faults, ReplayError, TraceError
from epicycle.tools.replaying.formats.base import Numbered
from epicycle.tools.replaying.formats.registry import choose
from epicycle.tools.replaying.source import Limits, Source
from epicycle.tools.replaying.workload_rows import concurrency_of, workload_rows

SHIPPED = "shipped:"


@dataclass
class TraceRows:
    """Rows not read yet, and what reports say of them. `serve` are the flags of a server made for a workload."""

    name: str
    format: str
    times: str
    rows: Iterator[Numbered]
    concurrency: int = 0
    serve: list[str] = field(default_factory=list)

    def keep_conversations(self, most: int) -> None:
        """Only the rows of the first `most` conversations; a row without one is a conversation."""
        self.rows = _first_conversations(self.rows, most)

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "format": self.format, "times": self.times}


def open_trace(paths: list[Path], name: str, limits: Limits, faults: Faults) -> TraceRows:
    """Every file's format is known before the first row is read. Raises TraceError."""
    sources = [Source(_found(path), limits) for path in paths]
    for source in sources:
        if not source.path.is_file():
            raise TraceError("no such file", path=source.name)
    chosen = [(source, choose(source, name)) for source in sources]
    formats = dict.fromkeys(one.name for _, one in chosen)
    times = dict.fromkeys(one.times for _, one in chosen)
    rows = (row for source, one in chosen for row in one.rows(source, faults))
    shown = ", ".join(path.name for path in paths)
    return TraceRows(shown, ", ".join(formats), ", ".join(times), rows)


def _found(path: Path) -> Path:
    """`shipped:NAME` is one of the traces that come with the package. Raises TraceError."""
    name = str(path)
    if not name.startswith(SHIPPED):
        return path
    found = Path(str(files("epicycle.tools").joinpath("traces", f"{name.removeprefix(SHIPPED)}.jsonl")))
    if not found.is_file():
        names = ", ".join(sorted(SHIPPED + one.stem for one in found.parent.glob("*.jsonl")))
        raise TraceError(f"is not one of {names}", path=name)
    return found


def open_workload(name: str, file: Path | None = None) -> TraceRows:
    """Raises ReplayError."""
    from epicycle.engine.models.config import read_spec
    from epicycle.engine.models.locate import locate

    try:
        read = read_workloads(file)
        workload = read.pick(name)
    except WorkloadError as error:
        raise ReplayError(str(error)) from None
    entry = read.model_of(workload)
    spec = read_spec(locate(entry.config, "random").folder)
    load = Load(workload, spec, read.defaults.seed)
    options = {
        "model": entry.config,
        "weights": entry.weights,
        "dtype": entry.dtype,
        "slots": workload.slots,
        "context_tokens": workload.context,
        "page_tokens": read.defaults.page_tokens,
        "exit_rule": workload.exit_rule,
    }
    serve = [word for key, value in options.items() for word in ("--set", f"engine.{key}={value}")]
    return TraceRows(name, "workload", "milliseconds", workload_rows(load), concurrency_of(workload), serve)


def _first_conversations(rows: Iterator[Numbered], most: int) -> Iterator[Numbered]:
    seen: set[str] = set()
    alone = 0
    for numbered in rows:
        name = numbered.row.session_id
        if name in seen:
            yield numbered
        elif len(seen) + alone < most:
            alone += not name
            seen |= {name} if name else set()
            yield numbered
        elif not seen:
            return  # only rows without conversations so far, and enough of them
