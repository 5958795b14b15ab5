"""A workload as requests in time: what is sent at the start, and what follows when a request ends.

Owns prompts, seeds, depths and the order of submissions, the same for every way of driving them. It knows no clock: a
delay counts from the start, or from the end of the request before. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from epicycle.engine.models.spec import ModelSpec
from epicycle.tools.bench_workload import Workload

FIRST_ARRIVAL_S = 1.0
ARRIVAL = "arrival"  # the label of requests beside a workload's own
_PROMPT, _DEPTHS = range(2)  # streams of one request's seed


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One sequence. `label` groups it in reports; `depths` prescribes exits where it isn't empty."""

    number: int
    label: str
    prompt: list[int]
    output: int
    threshold: float = 1.0
    depths: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Record:
    """What a request did; times by one clock. `depths` may be empty where a server doesn't tell."""

    number: int = 0
    label: str
    prompt_tokens: int
    submitted_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class Timed(NamedTuple):
    delay_s: float
    request: BenchRequest


class Load:
    """The requests of one run, without those `left_out`. `start` once, then `after` each request that has ended."""

    def __init__(self, workload: Workload, spec: ModelSpec, seed: int, left_out: frozenset[int] = frozenset()) -> None:
        self.workload = workload
        self._left_out = left_out
        self._loops = spec.loops
        self._seed = seed
        specials = [*spec.eos_ids, *(one for one in (spec.bos_id, spec.pad_id) if one is not None)]
        self._ids = np.setdiff1d(np.arange(spec.vocab_size), specials)
        self._next: deque[int] = deque()

    def start(self) -> list[Timed]:
        """What is sent first; begins anew."""
        work = self.workload
        self._next = deque(number for number in range(work.requests) if number not in self._left_out)
        if work.kind == "sessions":
            return [Timed(0.0, self.turn(session, 0, [])) for session in range(work.sessions)]
        at_once = len(self._next) if work.kind == "burst" else min(work.streams, len(self._next))
        return [Timed(0.0, self.stream(self._next.popleft())) for _ in range(at_once)] + self._arrivals()

    def after(self, request: BenchRequest, tokens: list[int]) -> list[Timed]:
        """What follows the end of `request`, which said `tokens`."""
        work = self.workload
        if work.kind == "sessions":
            session, turn = divmod(request.number, work.turns)
            if turn + 1 == work.turns:
                return []
            return [Timed(work.tool_ms / 1e3, self.turn(session, turn + 1, request.prompt + tokens))]
        is_replaced = work.kind == "closed" and request.label != ARRIVAL and self._next
        return [Timed(0.0, self.stream(self._next.popleft()))] if is_replaced else []

    def stream(self, number: int) -> BenchRequest:
        """Request `number` of the workload's own."""
        prompt = self._draw(number, self.workload.prompt_tokens(number))
        label = f"prompt of {len(prompt)}" if self.workload.prompts else "stream"
        return self._request(number, label, prompt, self.workload.output)

    def _arrivals(self) -> list[Timed]:
        beside = self.workload.arrivals
        if beside is None:
            return []
        timed = []
        for index in range(beside.count):
            number = self.workload.requests + index
            request = self._request(number, ARRIVAL, self._draw(number, beside.prompt), beside.output)
            timed.append(Timed(FIRST_ARRIVAL_S + index * beside.every_ms / 1e3, request))
        return timed

    def turn(self, session: int, turn: int, said: list[int]) -> BenchRequest:
        """Turn `turn` of a session: what was `said`, then the turn's own tokens."""
        work = self.workload
        number = session * work.turns + turn
        fresh = self._draw(number, work.new_tokens if turn else work.first_prompt)
        return self._request(number, f"turn {turn + 1}", said + fresh, work.output)

    def _draw(self, number: int, count: int) -> list[int]:
        generator = np.random.default_rng([self._seed, number, _PROMPT])
        drawn: list[int] = generator.choice(self._ids, size=count).tolist()
        return drawn

    def _request(self, number: int, label: str, prompt: list[int], output: int) -> BenchRequest:
        depths = self.workload.draw_depths([self._seed, number, _DEPTHS], self._loops, output)
        threshold = self.workload.threshold
        return BenchRequest(
            number=number, label=label, prompt=prompt, output=output, threshold=threshold, depths=depths
        )
