"""Workloads on an engine in this process, without server, messages or text.

Owns the clockwork: what is due is submitted, the pump turns, what has ended may bring the next request. Decode speed is
measured apart: every stream reads its prompt and waits, then all decode together and nothing else runs.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict

from epicycle.engine.engine import Engine
from epicycle.kvstore.reserve import lifetime_pages
from epicycle.tools.bench_load import BenchRequest, Load, Record, Timed
from epicycle.tools.bench_stats import RunResult
from epicycle.tools.offline import Offline, Reply, Request
from epicycle.transport.wire.columns import U16, pack
from epicycle.transport.wire.request import LoopBounds, Sampling

Clock = Callable[[], float]


def run_engine(engine: Engine, load: Load, *, measures_decode: bool = True, prefix_cache: bool = True) -> RunResult:
    """One run of a workload on an empty prefix cache, then its decode window where it has one."""
    offline = Offline(engine, prefix_cache=prefix_cache)
    before = _parts(engine)
    result = RunResult(records=drive(offline, load))
    result.counters = {
        name: float(value) for name, value in asdict(offline.pump.counters).items() if isinstance(value, int)
    }
    result.counters["prefix_hit_tokens"] = float(offline.hit_tokens)
    result.counters |= {name: value - before.get(name, 0.0) for name, value in _parts(engine).items()}
    if measures_decode and load.workload.kind != "sessions" and load.workload.output > 1:
        result.decode_streams = streams_that_fit(engine, load)
        result.decode_tokens_per_s = decode_window(Offline(engine), load, result.decode_streams)
    return result


def _parts(engine: Engine) -> dict[str, float]:
    """How the engine's device ticks were run so far; nothing where ticks are eager."""
    counters = engine.run_counters
    return {name: float(value) for name, value in asdict(counters).items()} if counters is not None else {}


def drive(
    offline: Offline, load: Load, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> list[Record]:
    """Every request of the load to its end, in order of their numbers. `offline` must have the same clock."""
    order = itertools.count()  # submissions due at one time keep their order
    due: list[tuple[float, int, BenchRequest]] = []
    live: dict[int, tuple[BenchRequest, Reply]] = {}
    done: list[tuple[int, Record]] = []

    def schedule(timed: list[Timed], now_s: float) -> None:
        for delay_s, request in timed:
            heapq.heappush(due, (now_s + delay_s, next(order), request))

    schedule(load.start(), clock())
    while due or live:
        while due and due[0][0] <= clock():
            _, _, request = heapq.heappop(due)
            reply = offline.submit(as_request(request))
            live[id(reply)] = (request, reply)
        if not offline.step() and due:
            sleep(max(0.0, due[0][0] - clock()))
        for reply in offline.drain_ended():
            request, _ = live.pop(id(reply))
            done.append((request.number, as_record(request, reply)))
            schedule(load.after(request, reply.tokens), clock())
    return [record for _, record in sorted(done, key=lambda one: one[0])]


def streams_that_fit(engine: Engine, load: Load) -> int:
    """How many of the workload's first streams the slots and the pool hold at once."""
    work, free_pages = load.workload, engine.plan.total_pages
    for number in range(min(work.streams, work.requests, engine.plan.slots)):
        free_pages -= lifetime_pages(work.prompt_tokens(number), work.output, engine.pool.page_tokens)
        if free_pages < 0:
            return number
    return min(work.streams, work.requests, engine.plan.slots)


def decode_window(offline: Offline, load: Load, streams: int, clock: Clock = time.perf_counter) -> float:
    """streams x (output - 1) over the time from the common start of decoding to the last token."""
    requests = [as_request(load.stream(number), is_held=True) for number in range(streams)]
    replies = [offline.submit(request) for request in requests]
    while not all(reply.tokens for reply in replies):
        offline.step()
    offline.release_held()
    started_s = clock()
    while offline.step():
        pass
    return streams * (load.workload.output - 1) / (max(reply.token_s[-1] for reply in replies) - started_s)


def as_request(request: BenchRequest, *, is_held: bool = False) -> Request:
    """Greedy, no end ids: the output has its full length."""
    loops = LoopBounds(exit_threshold=request.threshold, exit_trace=pack(U16, request.depths))
    sampling = Sampling(max_tokens=request.output, temperature=0.0)
    return Request(prompt=request.prompt, sampling=sampling, loops=loops, is_held=is_held)


def as_record(request: BenchRequest, reply: Reply) -> Record:
    """Raises RuntimeError for a request that didn't do what it was sent for."""
    assert reply.end is not None
    if reply.end.reason != "length" or len(reply.tokens) != request.output:
        text = f"request {request.number} ended with {reply.end.reason} after {len(reply.tokens)} of {request.output}"
        raise RuntimeError(f"{text} tokens {reply.end.message}{reply.end.warning}")
    return Record(
        number=request.number,
        label=request.label,
        prompt_tokens=reply.prompt_tokens,
        submitted_s=reply.submitted_s,
        token_s=reply.token_s,
        tokens=reply.tokens,
        depths=reply.exit_depths,
    )
