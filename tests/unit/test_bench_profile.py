"""The table of kernels that `bench --profile` tells."""

from __future__ import annotations

import pytest

from epicycle.tools import bench
from epicycle.tools.bench_profile import table
from epicycle.tools.bench_report import render_profile


def test_kernels_of_one_name_are_told_together_the_longest_first() -> None:
    found = table([("norm_kernel", 4, 1.0), ("void add<float, 4>(int)", 1, 0.5), ("void add<half>(int)", 2, 2.5)], 10.0)
    assert (10.0, 4.0) == (found["wall_ms"], found["kernel_ms"])
    assert [("add", 3, 3.0, 0.3), ("norm_kernel", 4, 1.0, 0.1)] == [tuple(row.values()) for row in found["kernels"]]


def test_both_windows_are_shown() -> None:
    one = table([("norm_kernel", 4, 1.0)], 4.0)
    text = render_profile({"streams": 3, "prompts": one, "decode": one})
    assert "profile of decode, 3 streams: 4.0 ms, 25.0 % of it in kernels" in text
    assert "norm_kernel" in text


def test_a_cpu_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "tiny_c1", "--repeats", "1", "--no-decode-window", "--device", "cpu", "--profile"]
    assert 1 == bench.main(words)
    assert "--profile needs a GPU" in capsys.readouterr().err
