"""The trace file: both forms, and what is refused at start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epicycle.actors.gateway.trace_file import load_traces, unfit
from epicycle.transport.config import ConfigError
from epicycle.transport.trace_rows import TraceRow, encode_row


def written(folder: Path, content: str | bytes) -> str:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_lists_is_read_as_it_stands(tmp_path: Path, indent: int | None) -> None:
    traces = {"a": [4, 1, 2], "b": [4]}
    assert traces == load_traces(written(tmp_path, json.dumps(traces, indent=indent)))


def test_rows_of_a_recording_are_traces_by_their_request_ids(tmp_path: Path) -> None:
    rows = [
        TraceRow(request_id="r1", input_length=3, exit_depths=[4, 2]),
        TraceRow(request_id="r2", input_length=3),
        TraceRow(request_id="r3", input_length=3, exit_depths=[4]),
    ]
    content = b"\n".join(encode_row(row) for row in rows)
    assert {"r1": [4, 2], "r3": [4]} == load_traces(written(tmp_path, content))


def test_no_file_has_no_traces() -> None:
    assert {} == load_traces("")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "JSON object"),
        ("[1, 2]", "JSON object"),
        ('{"a": [1, true]}', "JSON object"),
        ('{"a": []}', "'a' has no depths"),
        ('{"a": [4, 0]}', "depth 0 at 1"),
        ('{"a": [4, 2, 65536]}', "depth 65536 at 2"),
        ('{"request_id": "r", "input_length": 1, "exit_depths": [4]}\n\n{"input_length": -1}', "line 3"),
        ('{"request_id": "r", "input_length": 1, "exit_depths": [4, 0]}', "exit_depths"),
        (b"\xff\xfe", "JSON object"),
    ],
)
def test_what_cannot_be_a_trace_is_refused_at_start(tmp_path: Path, content: str | bytes, part: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as error:
        load_traces(path)
    assert path in str(error.value)
    assert part in str(error.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        load_traces(str(tmp_path / "nowhere"))


def test_traces_of_another_depth_are_found() -> None:
    assert ["shallow", "deep"] == unfit({"fits": [4, 1], "shallow": [3, 1], "deep": [4, 5]}, loops=4)
