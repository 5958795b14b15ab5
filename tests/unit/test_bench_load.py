"""Which requests a workload makes, and when."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from epicycle.tools.bench_load import Load, Timed
from epicycle.tools.bench_workload import Arrivals, Workload
from tests.fakes.tiny_models import OURO, spec_of

SPEC = replace(spec_of(OURO), bos_id=0, pad_id=1)  # eos is 2
CLOSED = Workload(name="w", model="m", kind="closed", streams=2, requests=3, prompt=50, output=4, context=54, slots=2)
TALK = Workload(
    name="t", model="m", kind="sessions", sessions=2, turns=2, first_prompt=5, new_tokens=3, output=4, tool_ms=250,
    context=40, slots=2,
)  # fmt: skip


def numbers(timed: list[Timed]) -> list[int]:
    return [one.request.number for one in timed]


def test_prompts_hold_no_special_id_and_differ_between_requests() -> None:
    load = Load(CLOSED, SPEC, seed=1)
    first, second = load.stream(0).prompt, load.stream(1).prompt
    assert 50 == len(first)
    assert not {0, 1, 2} & {*first, *second}
    assert first != second


def test_prompts_depend_on_seed_and_number_only() -> None:
    assert Load(CLOSED, SPEC, seed=1).stream(1) == Load(CLOSED, SPEC, seed=1).stream(1)
    assert Load(CLOSED, SPEC, seed=1).stream(1).prompt != Load(CLOSED, SPEC, seed=2).stream(1).prompt


def test_a_closed_load_replaces_what_ends_until_all_have_run() -> None:
    load = Load(CLOSED, SPEC, seed=1)
    started = load.start()
    assert [0, 1] == numbers(started)
    assert [2] == numbers(load.after(started[1].request, []))
    assert [] == load.after(started[0].request, [])


def test_a_load_can_be_started_again() -> None:
    load = Load(CLOSED, SPEC, seed=1)
    first = load.start()
    load.after(first[0].request, [])
    assert first == load.start()
    assert [2] == numbers(load.after(first[0].request, []))


def test_a_burst_sends_everything_at_once() -> None:
    load = Load(msgspec.structs.replace(CLOSED, kind="burst"), SPEC, seed=1)
    started = load.start()
    assert [0, 1, 2] == numbers(started)
    assert [0.0] * 3 == [one.delay_s for one in started]
    assert [] == load.after(started[0].request, [])


def test_arrivals_come_on_their_own_clock_and_are_not_replaced() -> None:
    arrivals = Arrivals(every_ms=200, prompt=9, output=2, count=3)
    load = Load(msgspec.structs.replace(CLOSED, arrivals=arrivals), SPEC, seed=1)
    beside = [one for one in load.start() if one.request.label == "arrival"]
    assert [1.0, 1.2, 1.4] == pytest.approx([one.delay_s for one in beside])
    assert [(9, 2)] * 3 == [(len(one.request.prompt), one.request.output) for one in beside]
    assert [] == load.after(beside[0].request, [5, 6])


def test_a_turn_repeats_what_was_said_and_adds_new_tokens_after_the_tool() -> None:
    load = Load(TALK, SPEC, seed=1)
    first = load.start()
    assert [0, 2] == numbers(first)
    said = [*first[1].request.prompt, 7, 8, 9, 10]
    (follower,) = load.after(first[1].request, [7, 8, 9, 10])
    assert (0.25, 3, "turn 2") == (follower.delay_s, follower.request.number, follower.request.label)
    assert said == follower.request.prompt[: len(said)]
    assert len(said) + 3 == len(follower.request.prompt)
    assert [] == load.after(follower.request, [1])


def test_traced_requests_list_a_depth_for_each_output() -> None:
    request = Load(msgspec.structs.replace(CLOSED, depths="trace-2.45"), SPEC, seed=1).stream(0)
    assert 4 == len(request.depths)
    assert SPEC.loops == request.depths[0]
