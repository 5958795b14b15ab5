"""The conditions of `verify` by name: how the engine differs from the plain one, and who shares its ticks.

Owns the table. A condition whose option this engine doesn't have, or that means nothing on its device, is skipped with
a reason. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from epicycle.tools.engine_options import has_option

NIXL_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """`options` change the engine's; `width` requests are in flight, company replaced as it ends.

    `is_staggered`: requests arrive in a shuffled order, some ticks apart. `grow_tokens`: leases grow by so much.
    `is_warm`: prompts that begin as the trials' do have been served before, and their pages are shared.
    `is_split`: another engine computes the prompts, and their KV is handed over by `connector`.
    `is_preempted`: again and again somebody is saved on the host, at any loop, and goes on elsewhere.
    `is_long`: company has prompts as long as the trials'.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    width: int = 12
    is_staggered: bool = False
    grow_tokens: int = 0
    is_warm: bool = False
    is_split: bool = False
    connector: str = "copy"
    is_preempted: bool = False
    is_long: bool = False
    needs_gpu: bool = False


CONDITIONS: dict[str, Condition] = {
    "8-concurrent": Condition(width=8),
    "64-concurrent": Condition(width=64),
    "128-concurrent": Condition(width=128),
    "slots-8": Condition(options={"slots": 8}, width=8),
    "long-company": Condition(width=16, is_long=True),
    "staggered": Condition(is_staggered=True),
    "growing-leases": Condition(grow_tokens=1),
    "prefix-hits": Condition(is_warm=True),
    "prefix-hits-chunk-64": Condition(options={"prompt_chunk_tokens": 64}, is_warm=True, is_staggered=True),
    "preempted": Condition(is_preempted=True, grow_tokens=16),
    "resumed": Condition(is_preempted=True, is_warm=True, is_staggered=True),
    "chunk-64": Condition(options={"prompt_chunk_tokens": 64}),
    "chunk-256": Condition(options={"prompt_chunk_tokens": 256}),
    "chunk-2048": Condition(options={"prompt_chunk_tokens": 2048}),
    "split": Condition(is_split=True),
    "split-nixl": Condition(is_split=True, connector="nixl"),
    "split-prefix-hits": Condition(is_split=True, is_warm=True, is_staggered=True),
    "split-poison": Condition(options={"poison": True}, is_split=True, is_staggered=True),
    "poison": Condition(options={"poison": True}),
    "packed": Condition(options={"pack_recurrent_planes": True}),
    "rectangular": Condition(options={"pack_recurrent_planes": False}),
    "eager": Condition(options={"graphs": "off"}, needs_gpu=True),
    "run-ahead-1": Condition(options={"run_ahead_ticks": 1}, needs_gpu=True),
    "run-ahead-4": Condition(options={"run_ahead_ticks": 4}, is_staggered=True, needs_gpu=True),
}


def skip_reason(condition: Condition, device: str) -> str:
    """Why a condition can't be tried on `device` ("cpu", "cuda"); empty where it can."""
    missing = [name for name in condition.options if not has_option(name)]
    if missing:
        return f"this engine has no option {', '.join(missing)}"
    if condition.needs_gpu and device != "cuda":
        return f"it means nothing on {device}: a tick there is complete when it returns"
    if condition.connector == "nixl" and not any(map(find_spec, NIXL_MODULES)):
        return "NIXL isn't installed: pip install 'epicycle[nixl]'"
    return ""


def share(trials: int, conditions: int) -> list[int]:
    """How many of the trials each condition gets: as even as they go, the first ones more."""
    return [trials // conditions + (place < trials % conditions) for place in range(conditions)]
