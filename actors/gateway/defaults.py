"""What a request that leaves a field out gets: the model folder's generation_config.json, else plain defaults.

`do_sample: false` without a temperature means greedy: the default temperature is 0 then. Loop bounds are fitted to the
depth that is served, so that a default can never be refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from epicycle.transport.wire.control import Capabilities

COMPLETION_MAX_TOKENS = 16
MIN_LOOPS = 2


class Defaults(msgspec.Struct, frozen=True):
    """As reported by /v1/models/{id}. `top_k` 0: off."""

    temperature: float
    top_p: float
    top_k: int
    exit_threshold: float
    min_loops: int
    max_loops: int


def resolve_defaults(generation: dict[str, Any], facts: Capabilities) -> Defaults:
    """`generation` is the content of generation_config.json."""
    greedy_or_plain = 0.0 if generation.get("do_sample") is False else 1.0
    max_loops = min(int(_value(generation, "max_loops", facts.loops)) or facts.loops, facts.loops)
    threshold = float(_value(generation, "exit_threshold", 1.0)) if facts.can_exit_early else 1.0
    return Defaults(
        temperature=float(_value(generation, "temperature", greedy_or_plain)),
        top_p=float(_value(generation, "top_p", 1.0)),
        top_k=max(0, int(_value(generation, "top_k", 0))),
        exit_threshold=threshold,
        min_loops=max(1, min(int(_value(generation, "min_loops", MIN_LOOPS)), max_loops)),
        max_loops=max_loops,
    )


def _value(generation: dict[str, Any], name: str, otherwise: float) -> float:
    value: float | None = generation.get(name)
    return otherwise if value is None else value
