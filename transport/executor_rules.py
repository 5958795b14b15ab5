"""Cross-field rules about executors: how many, on which devices, with which memory; rows of the tree's table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from epicycle.transport.executors import connector, crowded_device, device_kind, executor_specs, is_split

if TYPE_CHECKING:
    from epicycle.transport.config import Config

MOST_EXECUTORS = 64
_DEVICE = re.compile(r"cpu|cuda:\d+")


def _are_devices(
    path: str, read: Callable[[Config], list[str]]
) -> tuple[str, Callable[[Config], bool], Callable[[Config], str]]:
    return (
        path,
        lambda config: all(_DEVICE.fullmatch(device) for device in read(config)),
        lambda config: f"is {','.join(read(config))}, each must be cpu or cuda:N",
    )


EXECUTOR_RULES: tuple[tuple[str, Callable[[Config], bool], Callable[[Config], str]], ...] = (
    _are_devices("executor.replicas", lambda config: config.executor.replicas),
    _are_devices("executor.prefill", lambda config: config.executor.prefill),
    _are_devices("executor.decode", lambda config: config.executor.decode),
    (
        "executor.prefill",
        lambda config: bool(config.executor.prefill) == bool(config.executor.decode),
        lambda config: (
            f"is {config.executor.prefill} and executor.decode {config.executor.decode}: a split needs at least one "
            "executor of each (--prefill and --decode)"
        ),
    ),
    (
        "executor.replicas",
        lambda config: not (config.executor.replicas and is_split(config)),
        lambda config: (
            f"is {config.executor.replicas} together with executor.prefill and executor.decode: serve either replicas "
            "or a split"
        ),
    ),
    (
        "transfer.connector",
        lambda config: (connector(config) != "off") or not is_split(config),
        lambda config: "is off, but executor.prefill and executor.decode must hand each other KV: auto, nixl or copy",
    ),
    (
        "transfer.connector",
        lambda config: config.transfer.connector != "copy" or config.single_process,
        lambda config: "is copy, which works inside one process only: serve with single_process, or use nixl",
    ),
    (
        "executor.replicas",
        lambda config: len(executor_specs(config)) <= MOST_EXECUTORS,
        lambda config: f"asks for {len(executor_specs(config))} executors, at most {MOST_EXECUTORS} can be served",
    ),
    (
        "executor.replicas",
        lambda config: len({device_kind(spec.device) for spec in executor_specs(config)}) == 1,
        lambda config: (
            f"and the other roles are on {','.join(spec.device for spec in executor_specs(config))}: executors must be "
            "on one kind of device, as bits differ between cpu and cuda"
        ),
    ),
    (
        "executor.kv_memory_shares",
        lambda config: len(config.executor.kv_memory_shares) in (0, len(executor_specs(config))),
        lambda config: (
            f"has {len(config.executor.kv_memory_shares)} shares for {len(executor_specs(config))} executors; "
            "give one for each or none"
        ),
    ),
    (
        "executor.kv_memory_shares",
        lambda config: not crowded_device(executor_specs(config)),
        lambda config: (
            f"is {config.executor.kv_memory_shares}: several executors share {crowded_device(executor_specs(config))}, "
            "so each needs its share in bytes (or engine.kv_memory_bytes, the same for each)"
        ),
    ),
)
