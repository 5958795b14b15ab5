"""Sides that a workload is run beside, and what is told of them."""

from __future__ import annotations

import msgspec
import pytest

from epicycle.engine.errors import OptionError
from epicycle.tools.bench_load import Load, Record
from epicycle.tools.bench_sides import NAMES, Side, equal_outputs, ratios, read_side
from epicycle.tools.bench_workload import Arrivals, Workload, WorkloadError
from tests.fakes.tiny_models import OURO, spec_of

BURST = Workload(
    name="w", model="m", kind="burst", streams=3, requests=3, prompts=[5, 40, 6], output=4, context=48, slots=3
)
BESIDE = Arrivals(every_ms=10, prompt=9, output=2, count=3)


def test_every_name_is_a_side_that_changes_something() -> None:
    assert all(read_side(name) != Side(name=name) for name in NAMES)


def test_an_engine_option_is_a_side() -> None:
    assert {"numerics": "fast"} == read_side("numerics=fast").options


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(WorkloadError, match="--beside faster: neither OPTION=VALUE nor one of no-prefix-cache"):
        read_side("faster")
    with pytest.raises(OptionError, match="numerics is 'quick'"):
        read_side("numerics=quick")


def test_a_side_without_arrivals_sends_none() -> None:
    side, work = read_side("no-arrivals"), msgspec.structs.replace(BURST, arrivals=BESIDE)
    assert 3 == len(Load(side.changed(work), spec_of(OURO), 1).start())
    with pytest.raises(WorkloadError, match="w has no arrivals"):
        side.changed(BURST)


def test_a_side_without_the_longest_prompt_sends_the_others_under_their_numbers() -> None:
    side = read_side("no-longest")
    started = Load(side.changed(BURST), spec_of(OURO), 1, side.left_out(BURST)).start()
    assert [0, 2] == [one.request.number for one in started]
    with pytest.raises(WorkloadError, match="w has no longest prompt"):
        side.changed(msgspec.structs.replace(BURST, prompts=[5, 5, 5]))


def test_ratios_are_the_plain_figure_over_the_sides() -> None:
    plain = {"tokens_per_s": 30.0, "decode": None, "latency": {"stream": {"p50": 2.0}, "arrival": {"p50": 1.0}}}
    side = {"tokens_per_s": 20.0, "decode": 4.0, "latency": {"stream": {"p50": 4.0}}}
    assert {"tokens_per_s": 1.5, "latency": {"stream": {"p50": 0.5}}} == ratios(plain, side)


def test_outputs_are_compared_by_request() -> None:
    def one(number: int, *tokens: int) -> Record:
        return Record(number=number, label="stream", prompt_tokens=1, submitted_s=0.0, tokens=list(tokens))

    assert {"equal": 1, "of": 2} == equal_outputs([one(0, 5), one(1, 6), one(2, 7)], [one(1, 6), one(2, 8)])
