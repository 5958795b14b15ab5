"""`EngineOptions`: everything that decides what an engine loads and how its ticks compute.

Owns names, defaults and meanings, and the rules one field alone can break. It imports no torch and must not know what
a machine has: "auto" and 0 are resolved by `engine.py`, which sees the model and the device.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from epicycle.engine.errors import OptionError

Weights = Literal["auto", "random"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Numerics = Literal["invariant", "fast"]
TickKind = Literal["auto", "eager", "device"]
Graphs = Literal["on", "off"]
StartState = Literal["noise", "zero"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's settings. Raises OptionError for a value no model or machine could make right."""

    model: str = "embedded:ouro"
    """An embedded model or a shipped config by name, or a checkpoint folder."""
    weights: Weights = "auto"
    """auto: the checkpoint's own; random: drawn from `random_seed`, for tests and planning."""
    random_seed: int = 0
    """Key of random weights."""
    dtype: Dtype = "auto"
    """Of weights, states and KV. auto: float32 on a CPU, bfloat16 on a GPU."""
    device: str = "auto"
    """auto: the first GPU, else the CPU; or any torch device name."""
    slots: int = 32
    """Requests that can be resident at once."""
    context_tokens: int = 0
    """Longest request, prompt and outputs together; 0: the largest the pool funds, at most the model's limit."""
    page_tokens: int = 16
    """Positions per KV page."""
    kv_layout: str = "last_exited"
    """last_exited (a plane per loop), shared (one plane), or budgeted:K (K planes)."""
    pack_recurrent_planes: bool = True
    """Leave cells out of deeper planes that only prelude and coda layers would use."""
    kv_memory_bytes: int = 0
    """Bytes of the KV pool; 0: on a CPU 512 MiB, and never more than slots full contexts."""
    exit_rule: str = ""
    """Rule that ends a token's loops early; empty: what the model was made for."""
    loops: int = 0
    """Full depth to serve; 0: the model's own. A lower number serves the model as if it had fewer loops."""
    prompt_chunk_tokens: int = 0
    """Prompt rows that ride in one tick, over all prompts being read; 0: 64 on a CPU; on a GPU 512, or 2,048 where
    nothing decodes."""
    numerics: Numerics = "invariant"
    """invariant: a row's bits never depend on its company; fast: the library's defaults."""
    cpu_threads: int = 1
    """Threads of CPU operators. A fixed count: another one may give other bits."""
    run_ahead_ticks: int = 2
    """Ticks launched before the oldest is collected; the eager tick of a CPU is complete when it returns."""
    tick: TickKind = "auto"
    """device: the device decides what its rows do and the host reads it late; eager: the host looks after every loop.
    auto: device on a GPU, eager on a CPU."""
    graphs: Graphs = "on"
    """on: a GPU's device ticks are replayed from graphs captured at start; off: they are launched step by step."""
    start_state: StartState = "noise"
    """Of models that start from a drawn state: noise keyed by position, or zeros."""
    noise_seed: int = 0
    """Key of that noise for requests that name none."""
    poison: bool = False
    """Fill pages with NaN when they change hands, so that a stale read shows."""
    lookahead_seed: int = 0
    """Key of the random head of exit rule `random_lookahead`."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise OptionError("bad_option", f"{name} is {getattr(self, name)}; it must be at least {least}")


_LEAST = {
    "slots": 1,
    "context_tokens": 0,
    "page_tokens": 1,
    "kv_memory_bytes": 0,
    "loops": 0,
    "prompt_chunk_tokens": 0,
    "cpu_threads": 1,
    "run_ahead_ticks": 1,
}
