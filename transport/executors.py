"""Which executors a configuration asks for, and what each of them is told: name, role, device, memory.

Pure functions of the tree. It must not know processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from epicycle.transport.config import Config

PREFIX = "ex"


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """`role`: full (prompts and tokens), prefill (prompts for others), decode (tokens, and prompts where it must).
    `kv_memory_bytes` 0: the executor sizes its pool itself.
    """

    name: str
    role: str
    device: str
    kv_memory_bytes: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.name} on {self.device}" + ("" if self.role == "full" else f" ({self.role})")


def executor_specs(config: Config) -> list[ExecutorSpec]:
    """In the order of their numbers; one on engine.device unless several are asked for."""
    asked = config.executor
    roles = [*(("prefill", device) for device in asked.prefill), *(("decode", device) for device in asked.decode)]
    roles += [("full", device) for device in asked.replicas]
    return [
        ExecutorSpec(
            name=f"{PREFIX}{number}",
            role=role,
            device=device,
            kv_memory_bytes=_share(config, number),
        )
        for number, (role, device) in enumerate(roles or [("full", config.engine.device)])
    ]


def _share(config: Config, number: int) -> int:
    shares = config.executor.kv_memory_shares
    return shares[number] if number < len(shares) else config.engine.kv_memory_bytes


def is_split(config: Config) -> bool:
    """Prompts and tokens are computed by different executors."""
    return bool(config.executor.prefill or config.executor.decode)


def config_for(config: Config, name: str) -> Config:
    """The tree as the executor `name` should read it: its own device, slots and memory in the engine section, and the
    connector that it is to use."""
    spec = next(spec for spec in executor_specs(config) if spec.name == name)
    replace = msgspec.structs.replace
    slots = min(config.engine.slots, config.executor.prefill_slots) if spec.role == "prefill" else config.engine.slots
    engine = replace(config.engine, device=spec.device, slots=slots, kv_memory_bytes=spec.kv_memory_bytes)
    return replace(config, engine=engine, transfer=replace(config.transfer, connector=connector(config)))


def connector(config: Config) -> str:
    """off, nixl or copy: what `auto` stands for here."""
    asked = config.transfer.connector
    if asked != "auto":
        return asked
    if not is_split(config):
        return "off"
    return "copy" if config.single_process else "nixl"


def device_kind(device: str) -> str:
    """cpu, cuda or auto."""
    return device.partition(":")[0]


def crowded_device(specs: Sequence[ExecutorSpec]) -> str:
    """A GPU that several executors share without a memory share for each; empty when there is none."""
    for spec in specs:
        sharing = [other for other in specs if other.device == spec.device]
        if device_kind(spec.device) != "cpu" and len(sharing) > 1 and not all(each.kv_memory_bytes for each in sharing):
            return spec.device
    return ""
