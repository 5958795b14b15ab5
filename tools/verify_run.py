"""Runs requests alone and under a condition; returns what they gave.

Owns the schedule: who is submitted when, and the company that keeps the ticks as wide as the condition says. Must not
judge what comes back.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from epicycle.engine.engine import Engine
from epicycle.engine.hardware import give_back_memory
from epicycle.engine.kv_copy import KvCopy, copy_kv
from epicycle.engine.setup import resolve_device
from epicycle.tools.offline import Offline, Reply, Request
from epicycle.tools.offline_split import SplitOffline
from epicycle.tools.verify_compare import Outcome, outcome_of
from epicycle.tools.verify_conditions import Condition
from epicycle.transport.config import EngineConfig, TransferConfig
from epicycle.transport.wire.request import LoopBounds, Sampling

PREEMPTIONS_PER_TICK = 0.15
MOST_STEPS_APART = 9  # between staggered arrivals
STUCK_S = 300.0

Load = Callable[[EngineConfig], Engine]


SPLIT_KV_BYTES = 8 << 30  # of each of two engines that share a GPU


class EngineKeeper:
    """The engine of the options last asked for, and no other; or the two of a split."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._options: EngineConfig | None = None
        self._engine: Engine | None = None

    def get(self, options: EngineConfig) -> Engine:
        if self._engine is None or options != self._options:
            self._engine = None
            give_back_memory()
            self._engine, self._options = self._load(options), options
        return self._engine

    def get_pair(self, options: EngineConfig) -> tuple[Engine, Engine]:
        """Two engines of the same options, each with a memory share of its own on a GPU; nobody keeps them."""
        self._engine = None
        give_back_memory()
        if resolve_device(options.device).type == "cuda" and not options.kv_memory_bytes:
            options = msgspec.structs.replace(options, kv_memory_bytes=SPLIT_KV_BYTES)
        return self._load(options), self._load(options)


def run_alone(engine: Engine, request: Request) -> Outcome:
    """A request with nobody beside it, on an empty pump."""
    return outcome_of(Offline(engine).run([request])[0])


def kv_alone(engine: Engine, request: Request) -> KvCopy | None:
    """The KV that a request leaves when it runs alone."""
    offline, watch = Offline(engine), KvWatch(engine)
    watch.reply = offline.submit(request)
    offline.on_end = watch
    while offline.step():
        pass
    return watch.kv


class KvWatch:
    """Copies the KV of one reply when it ends. Meets `Offline.on_end`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reply: Reply | None = None
        self.kv: KvCopy | None = None

    def __call__(self, reply: Reply, pages: list[int]) -> None:
        if reply is self.reply and pages:
            self.kv = copy_kv(self._engine.pool, pages, reply.prompt_tokens + len(reply.tokens) - 1)


class Party:
    """Trials and their company in one pump, until the last trial has ended. `peak_rows`: most residents at once.

    `prefill` computes the prompts, where there is one. `hit_tokens`: prompt tokens of trials that were cached;
    `preemptions`: how often somebody was saved on the host; `attached_pages`: pages that those who came back found in
    the cache.
    """

    def __init__(
        self,
        engine: Engine,
        condition: Condition,
        company: Iterator[Request],
        seed: int,
        prefill: Engine | None = None,
    ) -> None:
        grow_tokens, is_warm = condition.grow_tokens, condition.is_warm
        if prefill is None:
            self._offline = Offline(engine, grow_tokens=grow_tokens, prefix_cache=is_warm)
        else:
            limits = TransferConfig(connector=condition.connector)
            self._offline = SplitOffline(engine, prefill, limits, grow_tokens=grow_tokens, prefix_cache=is_warm)
        self._watched: tuple[int, KvWatch] | None = None
        self._condition = condition
        self._company = company
        self._rng = random.Random(seed)
        self._in_flight = 0
        self._steps_to_next = 0
        self._ticks = 0
        self.peak_rows = 0
        self.hit_tokens = 0

    def run(self, trials: Sequence[Request]) -> list[Outcome]:
        """Outcomes in the order of `trials`. Raises RuntimeError when nothing ends for five minutes."""
        if self._condition.is_warm:
            self._offline.run([self._beginning(trial) for trial in trials])
            self._offline.drain_ended()
        places = list(range(len(trials)))
        waiting: deque[int | None] = deque(self._mixed(places))
        replies: dict[int, Reply] = {}
        last_end_s = time.monotonic()
        while len(replies) < len(trials) or any(reply.end is None for reply in replies.values()):
            for place in self._arrivals(waiting):
                reply = self._offline.submit(next(self._company) if place is None else trials[place])
                if place is not None:
                    replies[place] = reply
                    if self._watched is not None and self._watched[0] == place:
                        self._watched[1].reply = reply
            if self._condition.is_preempted and self._has_ticked() and self._rng.random() < PREEMPTIONS_PER_TICK:
                self._offline.preempt(self._rng.choice)
            self._offline.step()
            self.peak_rows = max(self.peak_rows, self._offline.running)
            ended = len(self._offline.drain_ended())
            self._in_flight -= ended
            last_end_s = time.monotonic() if ended else last_end_s
            if time.monotonic() - last_end_s > STUCK_S:
                raise RuntimeError(f"no request has ended for {STUCK_S:.0f} s; {self._in_flight} are in flight")
        if isinstance(self._offline, SplitOffline):
            self._offline.close()
        self.hit_tokens = sum(reply.cached_tokens for reply in replies.values())
        return [outcome_of(replies[place]) for place in places]

    def _has_ticked(self) -> bool:
        """Whether a tick has ended since the last look: rows must get to run however many steps their copies take."""
        before, self._ticks = self._ticks, self._offline.pump.counters.ticks
        return self._ticks > before

    def watch(self, place: int) -> KvWatch:
        """Keep the KV of trial `place`; call before `run`."""
        watch = KvWatch(self._offline.engine)
        self._watched, self._offline.on_end = (place, watch), watch
        return watch

    @property
    def preemptions(self) -> int:
        return self._offline.preemptions

    @property
    def attached_pages(self) -> int:
        return self._offline.attached_pages

    def _beginning(self, trial: Request) -> Request:
        """A request for the trial's prompt, or for as much of it as the seed says."""
        length = self._rng.choice((len(trial.prompt), self._rng.randint(1, len(trial.prompt))))
        return dataclasses.replace(trial, prompt=trial.prompt[:length], sampling=Sampling(1), loops=LoopBounds())

    def _mixed(self, places: list[int]) -> list[int | None]:
        """Trials and the first company (None) in an order of the seed's, or trials first where they arrive at once."""
        everyone: list[int | None] = [*places, *([None] * max(0, self._condition.width - len(places)))]
        if self._condition.is_staggered:
            self._rng.shuffle(everyone)
        return everyone

    def _arrivals(self, waiting: deque[int | None]) -> Iterator[int | None]:
        """Who comes before the next step; company once everybody has been."""
        if self._steps_to_next:
            self._steps_to_next -= 1
            return
        while self._in_flight < self._condition.width:
            self._in_flight += 1
            yield waiting.popleft() if waiting else None
            if self._condition.is_staggered:
                self._steps_to_next = self._rng.randrange(MOST_STEPS_APART)
                return
