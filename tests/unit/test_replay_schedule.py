"""Schedules under a clock of the tests' own: dependencies, times, conversations at once, failures, bad graphs."""

from __future__ import annotations

import pytest

from epicycle.tools.replaying.errors import Faults, TraceError
from epicycle.tools.replaying.timing import Timing
from epicycle.transport.trace_rows import TraceRow
from tests.fakes.replay import play, row, scheduled


def test_turns_of_a_session_follow_each_other_after_their_waits() -> None:
    rows = [row("a", "s"), row("b", "s", delay=5.0, tool_wait_ms=20.0), row("c", "s")]
    assert {"a": 0.0, "b": 35.0, "c": 45.0} == play(scheduled(rows)).sent


def test_a_row_waits_for_all_that_it_names_and_branches_run_together() -> None:
    rows = [
        row("plan", "s", branches=["left", "right"]),
        row("left", "l", wait_for=[]),
        row("right", "r", wait_for=["plan"]),
        row("join", "s", wait_for=["left", "right"], delay=1.0),
    ]
    assert {"plan": 0.0, "left": 10.0, "right": 10.0, "join": 21.0} == play(scheduled(rows)).sent


def test_a_row_may_wait_for_a_later_one() -> None:
    rows = [row("a", wait_for=["b"]), row("b")]
    assert {"b": 0.0, "a": 10.0} == play(scheduled(rows)).sent


def test_a_later_row_may_name_an_earlier_one_as_its_branch() -> None:
    rows = [row("child", wait_for=[]), row("parent", branches=["child"])]
    assert {"parent": 0.0, "child": 10.0} == play(scheduled(rows)).sent


def test_trace_times_are_relative_to_the_first_and_scaled() -> None:
    rows = [row("a", timestamp=1_000_000.0), row("b", timestamp=1_000_100.0), row("c", timestamp=1_000_400.0)]
    assert {"a": 0.0, "b": 50.0, "c": 200.0} == play(scheduled(rows, Timing(mode="trace", scale=0.5))).sent


def test_gaps_are_capped_and_what_follows_moves_along() -> None:
    rows = [row("a", timestamp=0.0), row("b", timestamp=90_000.0), row("c", timestamp=90_010.0)]
    assert {"a": 0.0, "b": 100.0, "c": 110.0} == play(scheduled(rows, Timing(mode="trace", gap_cap_ms=100.0))).sent
    waits = [row("a", "s"), row("b", "s", delay=90_000.0, tool_wait_ms=90_000.0)]
    assert 210.0 == play(scheduled(waits, Timing(gap_cap_ms=100.0))).sent["b"]


def test_dependencies_beat_timestamps() -> None:
    rows = [row("a", "s", timestamp=0.0), row("b", "s", timestamp=3.0), row("c", "s", timestamp=50.0)]
    assert {"a": 0.0, "b": 10.0, "c": 50.0} == play(scheduled(rows, Timing(mode="trace"))).sent


def test_a_named_delay_counts_from_the_end_and_not_from_the_timestamp() -> None:
    rows = [row("a", "s", timestamp=0.0), row("b", "s", timestamp=500.0, delay=7.0)]
    assert 17.0 == play(scheduled(rows, Timing(mode="trace"))).sent["b"]


def test_delays_can_be_ignored() -> None:
    rows = [row("a", "s"), row("b", "s", delay=500.0, tool_wait_ms=1e6)]
    assert 10.0 == play(scheduled(rows, Timing(ignore_delays=True))).sent["b"]


def test_conversations_begin_at_an_even_rate() -> None:
    rows = [row(f"{session}{turn}", session) for session in "abc" for turn in range(2)]
    sent = play(scheduled(rows, Timing(mode="rate", rate_per_s=4.0, is_poisson=False))).sent
    assert [0.0, 250.0, 500.0] == [sent[name] for name in ("a0", "b0", "c0")]
    assert 260.0 == sent["b1"]


def test_poisson_arrivals_are_the_same_for_a_seed() -> None:
    runs = [
        play(scheduled([row(f"{n}") for n in range(50)], Timing(mode="rate", rate_per_s=10.0, seed=seed))).sent
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert 2_000 < max(runs[0].values()) < 10_000


def test_a_ramp_spreads_the_first_conversations() -> None:
    rows = [row(f"{n}") for n in range(4)]
    sent = play(scheduled(rows, Timing(ramp_ms=100.0, ramped=2), concurrency=2)).sent
    assert {"0": 0.0, "1": 50.0, "2": 100.0, "3": 100.0} == sent


def test_no_more_conversations_than_allowed_and_a_tool_wait_keeps_the_turn() -> None:
    rows = [row(f"{session}{turn}", session, tool_wait_ms=30.0 * turn) for turn in range(2) for session in "abcd"]
    played = play(scheduled(rows, concurrency=2))
    assert 2 == played.most_at_once
    assert [0.0, 0.0, 50.0, 50.0] == [played.sent[f"{session}0"] for session in "abcd"]
    assert 40.0 == played.sent["a1"]


def test_a_conversation_that_waits_for_others_gives_its_turn_back() -> None:
    rows = [row("a0", "a"), row("a1", "a", wait_for=["b0", "a0"]), row("b0", "b", wait_for=["a0"]), row("c0", "c")]
    played = play(scheduled(rows, concurrency=1))
    assert {"a0": 0.0, "b0": 10.0, "a1": 20.0, "c0": 30.0} == played.sent


def test_a_failed_turn_leaves_out_its_conversation_and_what_waits_for_it() -> None:
    rows = [row("a", "s"), row("b", "s"), row("c", "s"), row("d", "t", wait_for=["b"]), row("e", "u")]
    played = play(scheduled(rows), fails=["a"])
    assert {"a", "e"} == played.sent.keys()
    assert ["b", "c", "d"] == sorted(played.skipped)


def test_rows_of_a_stopped_conversation_that_are_read_later_are_left_out_too() -> None:
    rows = [row(f"{n}", "s") for n in range(40)] + [row("x", "t")]
    played = play(scheduled(rows, read_ahead=3), fails=["0"])
    assert {"0", "x"} == played.sent.keys()
    assert 39 == len(played.skipped)


def test_after_an_error_the_rest_can_go_on() -> None:
    rows = [row("a", "s"), row("b", "s"), row("c", "s", wait_for=["a", "b"])]
    played = play(scheduled(rows, stops_sessions=False), fails=["a"])
    assert ["a", "b", "c"] == list(played.sent)


def test_parallel_rows_of_a_stopped_conversation_that_are_due_are_left_out() -> None:
    rows = [row("a", "s", wait_for=[], timestamp=0.0), row("b", "s", wait_for=[], timestamp=500.0)]
    played = play(scheduled(rows, Timing(mode="trace")), fails=["a"])
    assert ["b"] == played.skipped


@pytest.mark.parametrize(
    ("rows", "line", "part"),
    [
        ([row("a", wait_for=["b"]), row("b", wait_for=["a"])], 1, "a -> b"),
        ([row("z"), row("a", wait_for=["c"]), row("b", wait_for=["a"]), row("c", wait_for=["b"])], 2, "3 rows wait"),
        ([row("a"), row("b", wait_for=["nobody"])], 2, "'nobody' is no row"),
        ([row("a", wait_for=["a"])], 1, "waits for itself"),
        ([row("a"), row("a")], 2, "appears twice"),
        ([row("a", branches=["b"]), row("b", branches=["a"])], 1, "wait"),
    ],
)
def test_a_graph_that_cannot_end_is_an_error_before_any_sending(rows: list[TraceRow], line: int, part: str) -> None:
    schedule = scheduled(rows)
    with pytest.raises(TraceError, match=part) as raised:
        schedule.read()
    assert line == raised.value.line


def test_rows_in_a_circle_can_be_counted_and_left_out() -> None:
    faults = Faults("skip")
    rows = [row("a", wait_for=["b"]), row("b", wait_for=["a"]), row("c", wait_for=["nobody"]), row("d")]
    played = play(scheduled(rows, faults=faults))
    assert {"d"} == played.sent.keys()
    assert ["a", "b", "c"] == sorted(played.skipped)
    assert 2 == faults.skipped["bad row"]


def test_a_row_that_waits_beyond_what_is_read_ahead_is_an_error_and_no_hang() -> None:
    rows = [row("a", wait_for=["z"]), *(row(f"{n}", wait_for=["a"]) for n in range(20)), row("z")]
    with pytest.raises(TraceError, match="--read-ahead"):
        play(scheduled(rows, read_ahead=5))


def test_a_trace_of_any_length_is_held_in_parts_only() -> None:
    count = 0

    def endless() -> object:
        nonlocal count
        for count in range(20_000):
            yield row("", timestamp=float(count))

    played = play(scheduled(endless(), Timing(mode="trace"), read_ahead=100))  # type: ignore[arg-type]
    assert 19_999 == count
    assert 100 >= played.most_held
    assert 20_000 == len(played.sent)


def test_a_conversation_of_many_turns_in_another_file_order() -> None:
    """Rows of many conversations, mixed: each keeps its own order."""
    rows = [row(f"{session}-{turn}", f"{session}") for turn in range(30) for session in range(50)]
    played = play(scheduled(rows, concurrency=7, read_ahead=200))
    for session in range(50):
        sent = [played.sent[f"{session}-{turn}"] for turn in range(30)]
        assert sent == sorted(sent)
    assert 7 >= played.most_at_once


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([row("a", "s"), row("b", "s", delay=1e15)], "delay"),
        ([row("a", "s"), row("b", "s", tool_wait_ms=1e12)], "tool_wait_ms"),
        ([row("a", timestamp=0.0), row("b", timestamp=1.7e12)], "timestamp"),
        ([row("a", timestamp=1.7e12), row("b", timestamp=0.0)], "timestamp"),
    ],
)
def test_a_gap_that_nobody_would_wait_for_is_an_error_unless_gaps_are_capped(rows: list[TraceRow], field: str) -> None:
    with pytest.raises(TraceError, match=f"{field}.*--gap-cap-s"):
        scheduled(rows, Timing(mode="trace")).read()
    assert 2 == len(play(scheduled(rows, Timing(mode="trace", gap_cap_ms=50.0))).sent)


def test_no_more_bytes_are_read_ahead_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epicycle.tools.replaying.schedule.READ_AHEAD_BYTES", 10_000)
    rows = [row(f"{n}", text_input="x" * 1000, input_length=None) for n in range(500)]
    played = play(scheduled(rows, concurrency=1))
    assert 500 == len(played.sent)
    assert 10 >= played.most_held


def test_branches_that_never_come_are_not_remembered_for_ever() -> None:
    faults = Faults()
    rows = [row(f"{n}", branches=[f"nobody {n}"]) for n in range(300)]
    schedule = scheduled(rows, faults=faults, read_ahead=20)
    assert 300 == len(play(schedule).sent)
    assert 280 == faults.skipped["branches to rows that never came"]


def test_a_row_that_waited_for_its_conversations_turn_goes_with_another_that_got_it() -> None:
    rows = [row("0", "s"), row("1", "t"), row("2", "t", wait_for=[])]
    assert {"0": 0.0, "1": 10.0, "2": 10.0} == play(scheduled(rows, concurrency=1, read_ahead=2)).sent
