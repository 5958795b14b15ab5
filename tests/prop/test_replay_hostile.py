"""Damaged traces of every format: an error of ours or a counted row, never another exception and never a hang."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.formats.base import Numbered
from epicycle.tools.replaying.formats.registry import choose
from epicycle.tools.replaying.prompts import BodyOptions
from epicycle.tools.replaying.run import Plan, run
from epicycle.tools.replaying.source import Limits, Source
from epicycle.tools.replaying.timing import Timing
from epicycle.transport.trace_rows import TraceRow
from tests.fakes.replay import EchoTarget, play, row, scheduled
from tests.unit.test_replay_formats import GOLDEN
from tests.unit.test_replay_run import OURS, plan

LIMITS = Limits(line_bytes=4096, document_bytes=1 << 16, growth_from=1 << 16)
HARM = (
    b"NaN",
    b"-1",
    b"1e999",
    b"true",
    b"null",
    b"[",
    b"{",
    b'"',
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"\n",
    b"9" * 400,
    b"",
)
hits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(HARM)), min_size=1, max_size=6)


def harmed(content: bytes, damage: list[tuple[float, int, bytes]]) -> bytes:
    for where, length, harm in damage:
        at = int(where * len(content))
        content = content[:at] + harm + content[at + length :]
    return content


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(GOLDEN)), hits, st.sampled_from(["auto", "named"]))
def test_a_damaged_file_is_an_error_or_fewer_rows(
    name: str, damage: list[tuple[float, int, bytes]], asked: str
) -> None:
    content = harmed(GOLDEN[name][0].encode(), damage)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        source, faults = Source(path, LIMITS), Faults("skip")
        try:
            rows = list(choose(source, name if asked == "named" else "auto").rows(source, faults))
            summary = asyncio.run(run(replayed(rows, faults), EchoTarget(OURS)))
        except TraceError:
            return
        assert sum(summary["requests"].values()) <= len(rows)
        assert json.dumps(summary)


def replayed(rows: list[Numbered], faults: Faults) -> Plan:
    """A run of them that waits next to nothing and asks for a few tokens each."""
    timing, bodies = Timing(mode="trace", gap_cap_ms=0.1), BodyOptions(salt="s", max_output=3, over="cap")
    made = plan([], timing=timing, bodies=bodies, faults=faults)
    made.trace.rows = iter(rows)
    return made


names = st.integers(0, 12).map(str)
links = st.lists(
    st.tuples(names, st.none() | st.lists(names, max_size=3), st.lists(names, max_size=2), names), max_size=20
)


@settings(max_examples=300, deadline=None)
@given(links, st.integers(0, 3), st.integers(1, 30), st.sets(names), st.booleans())
def test_any_graph_of_rows_comes_to_an_end(
    graph: list[tuple[str, list[str] | None, list[str], str]],
    concurrency: int,
    read_ahead: int,
    fails: set[str],
    stops: bool,
) -> None:
    """Every row that was taken on is sent or left out, once, and never before what it waits for has ended."""
    rows: list[TraceRow] = [
        row(name, session, wait_for=wait_for, branches=branches) for name, wait_for, branches, session in graph
    ]
    faults = Faults("skip")
    schedule = scheduled(rows, faults=faults, concurrency=concurrency, read_ahead=read_ahead, stops_sessions=stops)
    try:
        played = play(schedule, fails=fails)
    except TraceError as error:
        assert "--read-ahead" in str(error)
        return
    assert played.sent.keys() == played.ended.keys()
    assert not played.sent.keys() & set(played.skipped)
    assert len(played.skipped) == len(set(played.skipped))
    for name, sent_ms in played.sent.items():
        for parent in played.rows[name].wait_for or ():
            assert parent not in played.sent or played.ended[parent] <= sent_ms
    if concurrency:
        assert played.most_at_once <= concurrency
