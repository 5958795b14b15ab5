"""Whole runs against a target of a few lines: records, summary, failure policy, salts, the report's text."""

from __future__ import annotations

import io
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.facts import Facts
from epicycle.tools.replaying.figures import EXACT, Figures, Slo, Values
from epicycle.tools.replaying.http_target import refusal, take_line
from epicycle.tools.replaying.observed import Observed, RequestRecord, fill
from epicycle.tools.replaying.progress import progress_bar
from epicycle.tools.replaying.prompts import BodyOptions
from epicycle.tools.replaying.run import Plan, run
from epicycle.tools.replaying.timing import Timing
from epicycle.tools.replaying.trace import TraceRows
from epicycle.transport.trace_rows import TraceRow
from tests.fakes.replay import EchoTarget, numbered, row, scheduled

OURS = Facts(model="m", speaks="epicycle", vocab_size=500, loops=4, exit_rule="ouro")
TALK = [row("a0", "a", output_length=3), row("b0", "b", output_length=2), row("a1", "a"), row("c0"), row("a2", "a")]


def plan(rows: list[TraceRow], **fields: Any) -> Plan:
    defaults: dict[str, Any] = {
        "trace": TraceRows("made", "native", "milliseconds", numbered(rows)),
        "faults": Faults(),
        "timing": Timing(),
        "bodies": BodyOptions(salt="salt"),
        "concurrency": 0,
        "stops_sessions": True,
        "read_ahead": 100,
        "slo": Slo(),
        "max_lag_ms": 10_000.0,
    }
    return Plan(**(defaults | fields))


async def test_every_row_is_recorded_and_summed(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    summary = await run(plan(TALK, out=out), EchoTarget(OURS))
    records = {one["id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert {"a0", "b0", "a1", "a2", "c0"} == records.keys()
    assert ({"ok": 5}, 8) == (summary["requests"], summary["output_tokens"])
    assert 12 / 8 == summary["mean_loops"]
    assert [1, 2, 3] == records["a0"]["exit_depths"]
    assert ["planned_ms", "sent_ms", "first_byte_ms", "first_token_ms", "last_token_ms", "end_ms"] == [
        name for name in records["a0"] if name.endswith("_ms") and name not in ("held_ms", "lag_ms")
    ]
    assert summary["is_valid"]


async def test_a_run_is_the_same_for_the_same_salt_and_another_for_another() -> None:
    bodies = []
    for salt in ("one", "one", "two"):
        target = EchoTarget(OURS)
        await run(plan(TALK, bodies=BodyOptions(salt=salt)), target)
        bodies.append([body["prompt"] for body in target.bodies])
    assert bodies[0] == bodies[1] != bodies[2]


@pytest.mark.parametrize(
    ("stops", "outcomes"), [(True, {"failed": 1, "ok": 2, "skipped": 2}), (False, {"failed": 1, "ok": 4})]
)
async def test_a_failed_turn_stops_its_conversation_or_does_not(stops: bool, outcomes: dict[str, int]) -> None:
    summary = await run(plan(TALK, stops_sessions=stops), EchoTarget(OURS, fails=[0]))
    assert outcomes == summary["requests"]
    assert {"overloaded": {"count": 1, "first": "no room"}} == summary["failures"]
    assert outcomes["ok"] == summary["latency"]["ttft_ms"]["count"]


async def test_nothing_but_failures_is_no_valid_run_and_has_no_latency() -> None:
    summary = await run(plan([row("a")]), EchoTarget(OURS, fails=[0]))
    assert not summary["is_valid"]
    assert {"count": 0} == summary["latency"]["ttft_ms"]


async def test_a_bad_row_ends_the_run_before_anything_is_sent() -> None:
    target = EchoTarget(OURS)
    with pytest.raises(TraceError, match="appears twice"):
        await run(plan([row("a"), row("a")]), target)
    assert [] == target.bodies


async def test_a_run_reads_no_more_than_it_needs_to_hold() -> None:
    read = 0

    def counting() -> Any:
        nonlocal read
        for one in numbered([row() for _ in range(3000)]):
            read += 1
            yield one

    class Watching(EchoTarget):
        async def send(self, *parts: Any) -> None:
            assert read <= len(self.bodies) + 1 + 50
            await super().send(*parts)

    one = plan([], concurrency=1, read_ahead=50)
    one.trace.rows = counting()
    assert {"ok": 3000} == (await run(one, Watching(OURS)))["requests"]


async def test_only_the_first_conversations() -> None:
    one = plan([])
    one.trace.rows = numbered(TALK)
    one.trace.keep_conversations(2)
    target = EchoTarget(OURS)
    assert {"ok": 4} == (await run(one, target))["requests"]


async def test_the_report_holds_the_figures_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    rows = [*TALK, row("<script>alert(1)</script>", "<b>")]
    await run(plan(rows, report=path), EchoTarget(OURS))
    page = path.read_text()
    assert 5 == page.count("<svg")
    assert "<script" not in page
    assert "<b>" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    for part in ("TTFT", "Loops per token", "by turn", "Conversations"):
        assert part in page


def record(**fields: Any) -> RequestRecord:
    return RequestRecord(id="a", sent_ms=100.0, end_ms=200.0, **fields)


def seen_at(*times: float) -> Observed:
    return Observed(lambda: 0.0, token_ms=array("d", times))


def test_latencies_come_from_token_events() -> None:
    figures = Figures(Slo(ttft_ms=15.0, tpot_ms=12.0))
    figures.add(record(tokens_out=3, turn=1, tokens_in=10, cached_tokens=4), seen_at(110.0, 120.0, 130.0))
    figures.add(record(tokens_out=2, turn=0, tokens_in=10, cached_tokens=0), seen_at(120.0, 125.0))
    summary = figures.summary()
    latency = summary["latency"]
    assert (10.0, 20.0) == (latency["ttft_ms"]["mean"] - 5.0, latency["ttft_ms"]["max"])
    assert (3, 10.0) == (latency["itl_ms"]["count"], latency["itl_ms"]["p50"])
    assert {5.0, 10.0} == {latency["tpot_ms"]["p50"] * 2 - latency["tpot_ms"]["max"], latency["tpot_ms"]["max"]}
    assert 30.0 == latency["e2e_ms"]["max"]
    assert 0.2 == summary["cache_hit_share"]
    assert [0.0, 0.4] == [turn["cache_hit_share"] for turn in summary["by_turn"]]
    assert 0.5 == summary["goodput"]["share"]


def test_values_stay_few_and_close_when_they_are_many() -> None:
    values = Values()
    for number in range(EXACT + 34_464):
        values.add(float(number % 1000 + 1))
    cuts = values.cuts()
    assert 100_000 == cuts["count"]
    for share, exact in (("p50", 500.0), ("p90", 900.0), ("p99", 990.0)):
        assert abs(cuts[share] / exact - 1) < 0.01
    assert (500.5, 1000.0) == (cuts["mean"], cuts["max"])
    assert 1000 >= len(values._bins)


def test_events_of_other_servers_count_as_a_token_each_where_they_have_text() -> None:
    seen = Observed(lambda: 1.0)
    for data in (
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}], "usage": null}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
    ):
        assert not take_line(b"data: " + data.encode(), seen)
    assert take_line(b"data: [DONE]", seen)
    one = record()
    fill(one, seen)
    assert ("ab", 2, 3, 2, "stop") == (seen.text, len(seen.token_ms), one.tokens_in, one.tokens_out, one.finish_reason)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'data: {"error": {"code": "engine_lost", "message": "gone"}}', "engine_lost"),
        (b'data: {"error": "gone"}', "error"),
        (b"data: {nonsense", "bad_event"),
        (b'data: {"choices": 7}', "bad_event"),
    ],
)
def test_an_error_event_fails_the_request(line: bytes, code: str) -> None:
    seen = Observed(lambda: 1.0)
    take_line(line, seen)
    one = record()
    fill(one, seen)
    assert ("failed", code) == (one.outcome, one.code)


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (b'{"error": {"code": "overloaded", "message": "full"}}', "overloaded", "full"),
        (b'{"error": {"type": "bad", "message": "x"}}', "bad", "x"),
        (b"<html>no</html>", "http_502", "<html>no</html>"),
        (b'["a"]', "http_502", '["a"]'),
        (b"\xff", "http_502", "\ufffd"),
    ],
)
def test_a_refusal_is_told_by_code_and_text(content: bytes, code: str, text: str) -> None:
    assert (code, text, 502) == refusal(502, content)


def test_what_a_model_thought_is_timed_but_is_no_reply() -> None:
    seen = Observed(lambda: 1.0)
    take_line(b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}', seen)
    take_line(b'data: {"choices": [{"delta": {"content": "yes"}}]}', seen)
    assert ("yes", 2) == (seen.text, len(seen.token_ms))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_wanted", "is_shown"), [
    (Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False),
])  # fmt: skip
def test_the_bar_is_for_terminals_only(
    stream: io.StringIO, is_wanted: bool, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    schedule = scheduled(TALK)
    schedule.read()
    figures = Figures()
    with progress_bar(is_wanted=is_wanted) as bar:
        figures.add(record(tokens_out=1), seen_at(150.0))
        bar.show(figures, schedule)
    assert is_shown == ("1/5 rows" in stream.getvalue())
