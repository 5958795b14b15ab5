"""The command line of replay: what it refuses, in one line and with exit code 1, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.tools.replay import fields_of, main
from epicycle.tools.replaying.errors import ReplayError
from epicycle.transport.trace_rows import encode_row
from tests.fakes.replay import row

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_row(row("a")))
    return str(path)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert 1 == main(words)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert 1 == captured.err.count("\n")
    return captured.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--target", NOWHERE], "TRACE files or --workload"),
        (["nowhere.jsonl", "--target", NOWHERE], "no such file"),
        (["shipped:none", "--target", NOWHERE], "shipped:chat"),
        (["--workload", "none", "--target", NOWHERE], "'none' is not one of"),
        (["--workload", "ouro_interference", "--target", NOWHERE], "arrivals"),
    ],
)
def test_without_a_usable_trace(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refused(words, capsys)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--target"),
        (["--target", "localhost:8000"], "neither http:// nor zmq://"),
        (["--target", NOWHERE], "/v1/models"),
        (["--target", "zmq://some/where"], "zmq://PORT"),
        (["--target", "zmq:///nowhere"], "/nowhere"),
        (["--target", NOWHERE, "--set", "x"], "FIELD=JSON"),
    ],
)
def test_without_a_usable_target(words: list[str], part: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refused([trace, *words], capsys)


@pytest.mark.parametrize(
    "words",
    [["--time-scale", "nan"], ["--rate", "0"], ["--concurrency", "-1"], ["--format", "pickle"], ["--gap-cap-s", "inf"]],
)
def test_options_out_of_range(words: list[str], trace: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([trace, "--target", NOWHERE, *words])


def test_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["--list-formats"])
    assert "bailian" in capsys.readouterr().out


def test_fields_are_json_or_text() -> None:
    assert {"a": 1, "b": "x", "c": [1], "d": None} == fields_of(["a=1", "b=x", "c=[1]", "d=null"])
    for bad in ("=1", "a=\udcff"):
        with pytest.raises(ReplayError):
            fields_of([bad])
