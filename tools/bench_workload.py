"""The named workloads of `workloads.toml`: reading and checking them, and the depths a workload prescribes.

Owns names, fields and their rules. It must not know how requests run or what is measured; torch-free.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

TRACES: dict[str, dict[int, float]] = {"trace-2.45": {2: 0.66, 3: 0.23, 4: 0.11}}
THRESHOLD = "threshold-"


class WorkloadError(Exception):
    """A workload can't be read, isn't there, or can't run on the model; the text names field and value."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown keys are errors."""


class Arrivals(_Table, frozen=True, kw_only=True):
    """Requests beside a workload's own: the first a second after the start, then one every `every_ms`."""

    every_ms: float
    prompt: int
    output: int
    count: int


class Workload(_Table, frozen=True, kw_only=True):
    """One load; the file's head says what the fields mean. `name` is its key there."""

    name: str = ""
    model: str
    kind: Literal["closed", "burst", "sessions"]
    output: int
    context: int
    slots: int
    streams: int = 0
    requests: int = 0
    prompt: int = 0
    prompts: list[int] = []
    depths: str = "fixed"
    arrivals: Arrivals | None = None
    sessions: int = 0
    turns: int = 0
    first_prompt: int = 0
    new_tokens: int = 0
    tool_ms: float = 0.0

    @property
    def wide(self) -> int:
        """Streams or sessions in flight at once."""
        return self.sessions or self.streams

    def prompt_tokens(self, number: int) -> int:
        return self.prompts[number] if self.prompts else self.prompt

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        last_turn = self.first_prompt + (self.turns - 1) * (self.output + self.new_tokens) if self.turns else 0
        longest = max([self.prompt, last_turn, *self.prompts]) + self.output
        return max(longest, self.arrivals.prompt + self.arrivals.output) if self.arrivals else longest

    @property
    def threshold(self) -> float:
        """The exit threshold of every request; 1.0 leaves the depth alone."""
        return float(self.depths.removeprefix(THRESHOLD)) if self.depths.startswith(THRESHOLD) else 1.0

    @property
    def exit_rule(self) -> str:
        """The engine's rule; empty: the model's own."""
        if self.depths in TRACES:
            return "trace"
        return "fixed" if self.depths == "fixed" else ""

    def draw_depths(self, seed: list[int], loops: int, output: int) -> list[int]:
        """A depth for each output under a trace, the first one full; empty without. Raises WorkloadError."""
        odds = TRACES.get(self.depths)
        if odds is None:
            return []
        if max(odds) > loops:
            raise WorkloadError(f"{self.name}: depths {self.depths!r} need {max(odds)} loops, the model runs {loops}")
        drawn = np.random.default_rng(seed).choice(list(odds), size=output - 1, p=list(odds.values()))
        return [loops, *drawn.tolist()]


class ModelEntry(_Table, frozen=True, kw_only=True):
    """What a workload's `model` stands for; empty dtype: the file's default."""

    config: str
    weights: Literal["auto", "random"]
    dtype: str = ""


class Defaults(_Table, frozen=True, kw_only=True):
    seed: int
    repeats: int
    dtype: str
    page_tokens: int


class WorkloadFile(_Table, frozen=True, kw_only=True):
    defaults: Defaults
    models: dict[str, ModelEntry]
    workloads: dict[str, Workload]

    def pick(self, name: str) -> Workload:
        """Raises WorkloadError naming those that exist."""
        if name not in self.workloads:
            raise WorkloadError(f"workload {name!r} is not one of {', '.join(self.workloads)}")
        return msgspec.structs.replace(self.workloads[name], name=name)

    def model_of(self, workload: Workload) -> ModelEntry:
        entry = self.models[workload.model]
        return entry if entry.dtype else msgspec.structs.replace(entry, dtype=self.defaults.dtype)


def read_workloads(path: Path | None = None) -> WorkloadFile:
    """The packaged file, or another of the same form. Raises WorkloadError."""
    source = path or files("epicycle.tools").joinpath("workloads.toml")
    try:
        read = msgspec.convert(tomllib.loads(source.read_text()), WorkloadFile)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise WorkloadError(f"{source}: {error}") from error
    for name in read.workloads:
        faults = _faults(read, read.pick(name))
        if faults:
            raise WorkloadError(f"{source}: {name}: {'; '.join(faults)}")
    return read


def _faults(read: WorkloadFile, load: Workload) -> list[str]:
    """What a workload's fields get wrong together."""
    talks = load.kind == "sessions"
    needed = ("sessions", "turns", "first_prompt", "new_tokens") if talks else ("streams", "requests")
    rules = [
        (load.model in read.models, f"model {load.model!r} is not one of {', '.join(read.models)}"),
        (load.output >= 1, f"output is {load.output}, must be at least 1"),
        (all(getattr(load, field) >= 1 for field in needed), f"kind {load.kind!r} needs {', '.join(needed)}"),
        (talks or bool(load.prompt) != bool(load.prompts), "give one of prompt and prompts"),
        (not load.prompts or len(load.prompts) == load.requests, "prompts needs an entry for each request"),
        (
            load.longest_tokens <= load.context,
            f"its longest request has {load.longest_tokens} tokens, above context {load.context}",
        ),
        (_knows_depths(load.depths), f"depths {load.depths!r} is not fixed, {', '.join(TRACES)} or threshold-T"),
    ]
    return [text for is_met, text in rules if not is_met]


def _knows_depths(depths: str) -> bool:
    if depths == "fixed" or depths in TRACES:
        return True
    try:
        return depths.startswith(THRESHOLD) and 0 <= float(depths.removeprefix(THRESHOLD)) <= 1
    except ValueError:
        return False
