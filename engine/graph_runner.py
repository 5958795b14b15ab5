"""How the parts of a device tick are run: one after the other, or as captured graphs.

Owns the name of a part, the counters and the plain runner. A part reads and writes tensors at fixed addresses only, so
running it and replaying it are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from epicycle.engine.route import TickWork
from epicycle.engine.tick_inputs import TickShape


@dataclass(frozen=True, slots=True)
class Part:
    """`name` is loop, token, greedy or sampled; `flag` is what else its launches depend on: a prelude, ends of
    prompts."""

    name: str
    shape: TickShape
    flag: bool = False


@dataclass(slots=True)
class RunCounters:
    """Totals since the start."""

    replays: int = 0
    eager_parts: int = 0
    padding_rows: int = 0
    whole_tokens: int = 0


class Runner(Protocol):
    counters: RunCounters

    def run(self, part: Part, launch: Callable[[], None]) -> None:
        """Do what `launch` does."""
        ...

    def count(self, work: TickWork, shape: TickShape) -> None: ...


@dataclass(slots=True)
class PlainRunner:
    """Meets `Runner` by launching everything each time."""

    counters: RunCounters = field(default_factory=RunCounters)

    def run(self, part: Part, launch: Callable[[], None]) -> None:
        launch()
        self.counters.eager_parts += 1

    def count(self, work: TickWork, shape: TickShape) -> None:
        count_work(self.counters, work, shape)


def count_work(counters: RunCounters, work: TickWork, shape: TickShape) -> None:
    counters.padding_rows += shape.decode_rows + shape.prompt_rows - len(work.decode) - work.prompt_rows
    counters.whole_tokens += work.loops > 1
