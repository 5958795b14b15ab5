"""The traces that ship are what their script makes, and fit the embedded models."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.tools import make_traces
from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.source import Limits
from epicycle.tools.replaying.trace import open_trace
from tests.fakes.replay import play, scheduled

NAMES = list(make_traces.TRACES)


def test_the_script_makes_the_files_that_ship_bit_by_bit(tmp_path: Path) -> None:
    assert 0 == make_traces.main([str(tmp_path)])
    for name in NAMES:
        assert (make_traces.SHIPPED / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_trace_plays_to_its_end(name: str) -> None:
    trace = open_trace([Path(f"shipped:{name}")], "auto", Limits(), Faults())
    rows = [found.row for found in trace.rows]
    played = play(scheduled(rows, concurrency=3))
    assert len(rows) == len(played.ended)
    assert [] == played.skipped


def test_agents_helpers_run_at_once_and_are_waited_for() -> None:
    trace = open_trace([Path("shipped:tool-agent")], "auto", Limits(), Faults())
    played = play(scheduled([found.row for found in trace.rows]))
    helpers = [f"agent-0/helper-{number}" for number in range(3)]
    assert 1 == len({played.sent[name] for name in helpers})
    assert played.ended["agent-0/tool-1"] == played.sent[helpers[0]]
    assert played.sent["agent-0/join"] > played.ended[helpers[0]]


def test_a_trace_that_does_not_ship_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(TraceError, match="shipped:chat, shipped:long-context, shipped:tool-agent"):
        open_trace([Path("shipped:nothing")], "auto", Limits(), Faults())
