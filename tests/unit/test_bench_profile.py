"""The tables of kernels and ticks that `bench --profile` tells."""

from __future__ import annotations

import pytest

from epicycle.engine.profiling import TickRows
from epicycle.tools import bench
from epicycle.tools.bench_profile import table, tick_table
from epicycle.tools.bench_report import render_profile


def test_kernels_of_one_name_are_told_together_the_longest_first() -> None:
    found = table([("norm_kernel", 4, 1.0), ("void add<float, 4>(int)", 1, 0.5), ("void add<half>(int)", 2, 2.5)], 10.0)
    assert (10.0, 4.0) == (found["wall_ms"], found["kernel_ms"])
    assert [("add", 3, 3.0, 0.3), ("norm_kernel", 4, 1.0, 0.1)] == [tuple(row.values()) for row in found["kernels"]]


def test_ticks_of_one_shape_are_told_together_the_longest_first() -> None:
    decode, prompt = TickRows(32, 0, 4), TickRows(8, 2040, 1)
    found = tick_table([(decode, 11.0), (prompt, 10.0), (prompt, 12.5)], [0.25, 0.5])
    assert (33.5, 0.75, 3) == (found["ms"], found["between_ms"], found["ticks"])
    assert [(8, 2040, 1, 2, 22.5, 11.25), (32, 0, 4, 1, 11.0, 11.0)] == [tuple(row.values()) for row in found["shapes"]]


def test_windows_and_ticks_are_shown() -> None:
    one = table([("norm_kernel", 4, 1.0)], 4.0)
    ticks = tick_table([(TickRows(3, 0, 4), 11.0)], [])
    text = render_profile({"streams": 3, "prompts": one, "decode": one, "ticks": ticks})
    assert "profile of decode, 3 streams: 4.0 ms, 25.0 % of it in kernels" in text
    assert "norm_kernel" in text
    assert "3 decode rows, 0 prompt rows, 4 loops" in text


def test_a_cpu_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "tiny_c1", "--repeats", "1", "--no-decode-window", "--device", "cpu", "--profile"]
    assert 1 == bench.main(words)
    assert "--profile needs a GPU" in capsys.readouterr().err
