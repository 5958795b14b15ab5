"""`bench` on a tiny engine: the clockwork of a run, its decode window, and the command from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from epicycle.engine.engine import Engine
from epicycle.engine.slots import slot_bytes
from epicycle.tools import bench
from epicycle.tools.bench_engine import decode_window, drive, run_engine, streams_that_fit
from epicycle.tools.bench_load import Load, Record
from epicycle.tools.bench_workload import Arrivals, Workload
from epicycle.tools.offline import Offline
from tests.fakes.serving import tiny_engine, tiny_folder

BURST = Workload(
    name="b", model="m", kind="burst", streams=3, requests=3, prompt=9, output=4, context=13, slots=4,
    depths="trace-2.45",
)  # fmt: skip
CLOSED = msgspec.structs.replace(BURST, name="c", kind="closed", streams=2, requests=5)
TALK = Workload(
    name="t", model="m", kind="sessions", sessions=2, turns=3, first_prompt=6, new_tokens=2, output=3, tool_ms=90_000,
    context=32, slots=2,
)  # fmt: skip
FILE = """
[defaults]
seed = 7
repeats = 2
dtype = "float32"
page_tokens = 4
[models.m]
config = "{folder}"
weights = "auto"
[workloads]
b = {{ model = "m", kind = "burst", streams = 2, requests = 2, prompt = 8, output = 4, context = 16, slots = 2 }}
e = {{ model = "m", kind = "closed", streams = 2, requests = 3, prompt = 8, output = 4, context = 16, slots = 2, \
depths = "threshold-0.4" }}
"""


class ManualClock:
    """Time that passes only when somebody sleeps, and a little with every look, as if work took time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("m"), "ouro")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder, slots=4, context_tokens=48, exit_rule="trace")


def run(engine: Engine, workload: Workload) -> tuple[list[Record], ManualClock]:
    clock = ManualClock()
    records = drive(Offline(engine, clock=clock), Load(workload, engine.spec, seed=1), clock, clock.sleep)
    return records, clock


def test_every_request_gives_its_outputs_at_the_listed_depths(engine: Engine) -> None:
    records, _ = run(engine, BURST)
    load = Load(BURST, engine.spec, seed=1)
    assert [load.stream(number).depths for number in range(3)] == [record.depths for record in records]
    assert [4] * 3 == [len(record.token_s) for record in records]


def test_a_closed_load_keeps_its_streams_in_flight(engine: Engine) -> None:
    records, _ = run(engine, CLOSED)
    assert 5 == len(records)
    ends = sorted(record.token_s[-1] for record in records)
    starts = sorted(record.submitted_s for record in records)
    assert all(start > end for start, end in zip(starts[2:], ends, strict=False))


def test_arrivals_wait_for_their_time(engine: Engine) -> None:
    arrivals = Arrivals(every_ms=60_000, prompt=7, output=2, count=2)
    records, clock = run(engine, msgspec.structs.replace(BURST, arrivals=arrivals))
    beside = [record.submitted_s for record in records if record.label == "arrival"]
    assert [1.0, 61.0] == pytest.approx(beside, abs=0.1)
    assert clock.slept


def test_turns_follow_their_tool_time(engine: Engine) -> None:
    records, clock = run(engine, TALK)
    first, second, third = records[:3]
    assert ["turn 1", "turn 2", "turn 3"] == [record.label for record in records[:3]]
    assert [6, 11, 16] == [record.prompt_tokens for record in records[:3]]
    assert second.submitted_s - first.token_s[-1] >= 90
    assert third.submitted_s - second.token_s[-1] >= 90
    assert clock.slept


def test_the_decode_window_holds_no_prompt_rows(engine: Engine) -> None:
    offline, clock = Offline(engine), ManualClock()
    started: list[tuple[int, float]] = []

    def watch() -> float:
        started.append((offline.pump.counters.prompt_row_loops, clock.now_s))
        return clock.now_s

    decode_window_rate = decode_window(offline, Load(BURST, engine.spec, seed=1), 3, watch)
    assert 3 * 9 * 4 == started[0][0] == offline.pump.counters.prompt_row_loops
    assert decode_window_rate > 0


def test_only_streams_that_fit_decode_together(folder: Path, engine: Engine) -> None:
    room = 11 * engine.pool.facts.page_bytes + 3 * slot_bytes(engine.spec, 20, 4)  # a stream needs four pages
    tight = tiny_engine(folder, slots=4, context_tokens=20, exit_rule="trace", kv_memory_bytes=room)
    load = Load(msgspec.structs.replace(BURST, output=8, context=17), tight.spec, seed=1)
    assert 2 == streams_that_fit(tight, load)
    result = run_engine(tight, load)
    assert (3, 2) == (len(result.records), result.decode_streams)


def test_counters_are_those_of_one_run(engine: Engine) -> None:
    load = Load(BURST, engine.spec, seed=1)
    first, second = (run_engine(engine, load, measures_decode=False).counters for _ in range(2))
    assert first == second
    assert (27, 12) == (first["prompt_tokens"], first["generated_tokens"])


def test_a_request_that_ends_early_is_an_error(engine: Engine) -> None:
    load = Load(msgspec.structs.replace(BURST, prompt=47, output=9, depths="fixed"), engine.spec, seed=1)
    with pytest.raises((RuntimeError, AssertionError)):
        drive(Offline(engine), load)


def test_the_command_prints_figures_and_ends_with_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.toml"
    path.write_text(FILE.format(folder=folder))
    words = ["--file", str(path), "--workload", "b", "e", "--bandwidth", "1e9", "--flops", "1e9"]
    assert 0 == bench.main([*words, "--out", str(tmp_path / "out")])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ["b", "e"] == [result["workload"] for result in report["results"]]
    full, early = report["results"]
    assert [2, 2] == [len(full["runs"]), len(early["runs"])]
    assert 8 == full["median"]["output_tokens"]
    assert 4.0 == full["median"]["mean_loops"]
    assert early["median"]["mean_loops"] < 4.0
    assert 0 < full["floor"]["fraction"] < 1
    assert "float32" == full["dtype"]
    assert {"torch", "python"} <= set(report["versions"])
    assert report == json.loads((tmp_path / "out" / "bench.json").read_text())


def test_options_go_to_the_engine(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.toml"
    path.write_text(FILE.format(folder=folder))
    words = ["--file", str(path), "--workload", "b", "--repeats", "1", "--no-decode-window"]
    assert 0 == bench.main([*words, "--set", "prompt_chunk_tokens=3"])
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["median"]["decode_tokens_per_s"] is None
    assert 16 / 3 * 4 <= result["median"]["counters"]["ticks"]


def test_sides_run_on_the_same_engine_in_turn_or_on_one_of_their_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.toml"
    path.write_text(FILE.format(folder=folder))
    words = ["--file", str(path), "--workload", "b", "--repeats", "2", "--no-decode-window"]
    assert 0 == bench.main([*words, "--beside", "no-prefix-cache", "prompt_chunk_tokens=3"])
    text = capsys.readouterr().out
    (result,) = json.loads(text.splitlines()[-1])["results"]
    assert ["no-prefix-cache", "prompt_chunk_tokens=3"] == list(result["beside"])
    for side in result["beside"].values():
        assert (2, {"equal": 2, "of": 2}) == (len(side["runs"]), side["outputs"])
        assert side["ratios"]["tokens_per_s"] > 0
    chunked = result["beside"]["prompt_chunk_tokens=3"]
    assert result["median"]["counters"]["ticks"] < chunked["median"]["counters"]["ticks"]
    assert "plain / side: outputs equal in 2 of 2 requests" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--workload", "tiny_b8", "--beside", "no-arrivals"], "tiny_b8 has no arrivals to leave out"),
        (["--workload", "nonsense"], "'nonsense' is not one of"),
        (["--workload", "tiny_b8", "--set", "slotz=3"], "slotz=3: not OPTION=VALUE"),
        (["--workload", "tiny_b8", "--set", "slots=no"], "Expected `int`"),
        (["--workload", "tiny_b8", "--model", "nowhere"], "--model nowhere"),
        (["--workload", "ouro_2k_b32", "--model", "embedded:ouro"], "longer than the 1024 that embedded:ouro"),
    ],
)
def test_bad_words_end_with_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == bench.main(words)
    assert expected in capsys.readouterr().err


def test_a_lower_depth_is_the_floors_and_the_prompts_depth(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.toml"
    path.write_text(FILE.format(folder=folder))
    words = ["--file", str(path), "--workload", "b", "--repeats", "1", "--no-decode-window"]
    rates = ["--bandwidth", "1e9", "--flops", "1e9"]
    floors = []
    for loops in (2, 4):
        assert 0 == bench.main([*words, *rates, "--set", f"loops={loops}"])
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert loops == result["median"]["mean_loops"]
        floors.append(result["floor"]["serial_s"])
    assert floors[0] < floors[1]


def test_the_first_run_warms_up_or_counts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.toml"
    path.write_text(FILE.format(folder=folder))
    orders: list[str] = []
    monkeypatch.setattr(
        "epicycle.tools.bench_engine.run_engine",
        lambda engine, load, **more: orders.append(str(more["measures_decode"])) or run_engine(engine, load, **more),
    )
    for more, expected in (([], ["False", "True"]), (["--no-warm-up"], ["True"])):
        orders.clear()
        assert 0 == bench.main(["--file", str(path), "--workload", "b", "--repeats", "1", *more])
        assert expected == orders
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert 1 == len(result["runs"])


def test_no_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--workload", "tiny_b8", "--repeats", "0"])
    assert "0 is below 1" in capsys.readouterr().err


def test_without_a_workload_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == bench.main([])
    assert "ouro_1k_c1" == capsys.readouterr().out.splitlines()[0]
