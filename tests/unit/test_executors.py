"""From flags to executors: names, roles, devices, memory; and what is refused, with value, limit and knob."""

from __future__ import annotations

import pytest

from epicycle.tools.serve_flags import read
from epicycle.transport.config import ConfigError
from epicycle.transport.executors import ExecutorSpec, config_for, executor_specs


def test_one_executor_is_on_the_device_of_the_engine() -> None:
    config = read(["--device", "cuda:3", "--kv-memory", "1000000"])
    assert [ExecutorSpec("ex0", "full", "cuda:3", 1_000_000)] == executor_specs(config)
    assert "off" == config_for(config, "ex0").transfer.connector


def test_replicas_are_full_executors() -> None:
    config = read(["--replicas", "cuda:0, cuda:1", "--slots", "7"])
    assert [("ex0", "full", "cuda:0"), ("ex1", "full", "cuda:1")] == [
        (spec.name, spec.role, spec.device) for spec in executor_specs(config)
    ]
    assert ("cuda:1", 7) == (config_for(config, "ex1").engine.device, config_for(config, "ex1").engine.slots)


def test_a_split_numbers_those_that_compute_prompts_first() -> None:
    config = read(["--prefill", "cuda:0", "--decode", "cuda:1,cuda:2"])
    assert [("ex0", "prefill", "cuda:0"), ("ex1", "decode", "cuda:1"), ("ex2", "decode", "cuda:2")] == [
        (spec.name, spec.role, spec.device) for spec in executor_specs(config)
    ]
    assert "nixl" == config_for(config, "ex1").transfer.connector


def test_few_prompts_are_under_way_at_once() -> None:
    config = read(["--prefill", "cpu", "--decode", "cpu", "--slots", "64", "--prefill-slots", "5"])
    assert [5, 64] == [config_for(config, name).engine.slots for name in ("ex0", "ex1")]
    assert 3 == config_for(read(["--prefill", "cpu", "--decode", "cpu", "--slots", "3"]), "ex0").engine.slots


def test_executors_of_one_process_copy() -> None:
    config = read(["--prefill", "cpu", "--decode", "cpu", "--single-process"])
    assert "copy" == config_for(config, "ex0").transfer.connector


def test_each_executor_has_its_share_of_memory() -> None:
    config = read(["--prefill", "cuda:0", "--decode", "cuda:0", "--kv-memory-shares", "4000000,8000000"])
    assert [4_000_000, 8_000_000] == [config_for(config, name).engine.kv_memory_bytes for name in ("ex0", "ex1")]


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--prefill", "cpu"], ["executor.prefill is ['cpu'] and executor.decode []", "--prefill and --decode"]),
        (
            ["--replicas", "cpu,cpu", "--prefill", "cpu", "--decode", "cpu"],
            ["executor.replicas is ['cpu', 'cpu'] together with"],
        ),
        (["--replicas", "cpu,cuda:0"], ["on one kind of device"]),
        (["--replicas", "gpu0,cpu"], ["executor.replicas is gpu0,cpu, each must be cpu or cuda:N"]),
        (["--replicas", "cuda:0,cuda:0"], ["several executors share cuda:0", "its share in bytes"]),
        (["--replicas", "cpu,cpu", "--kv-memory-shares", "1"], ["has 1 shares for 2 executors"]),
        (["--prefill", "cpu", "--decode", "cpu", "--set", "transfer.connector=off"], ["transfer.connector is off"]),
        (["--prefill", "cpu", "--decode", "cpu", "--set", "transfer.connector=copy"], ["inside one process only"]),
    ],
)
def test_what_can_not_be_served_is_refused(flags: list[str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    for text in texts:
        assert text in str(caught.value)
