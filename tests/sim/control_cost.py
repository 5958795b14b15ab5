"""What control costs at 128 streams: admission, hashing of prompts, leases and reports, in time per token step.

Run by hand: `python -m tests.sim.control_cost`. Streams of 896 tokens in and 128 out, replaced as they end, a quarter
of them with a prompt that was served before; leases grow and prompts are shared as by default. Only control's own turns
are timed, with the mock executor and a fake gateway beside it in one thread. The last line is JSON.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import random
import statistics
import time

from tests.sim.world import World, make_config

STREAMS, PROMPT, OUTPUT = 128, 1024 - 128, 128  # the mock's context is 1,024
STEPS, WARM_STEPS, ROUNDS = 600, 200, 3
# A token of each stream, prompts included, at the floor of about this load on an H200: ouro_1k_b128 in docs/benchmarks
TOKEN_MS = 128 / 3035 * 1e3


class Load:
    def __init__(self, seed: int) -> None:
        config = make_config(
            pages=STREAMS * 80, slots=STREAMS, chunk_tokens=512, prefix_cache=True, low_water_tokens=32, grow_tokens=64
        )
        self.world = World(config)
        self.rng = random.Random(seed)
        self.prompts: list[list[int]] = []
        self.rids: list[int] = []
        self.control_s: list[float] = []  # of the thread's own time, by step

    def step(self) -> None:
        heard = self.world.gateway.heard
        self.rids = [rid for rid in self.rids if not heard[rid].terminals]
        while len(self.rids) < STREAMS:
            self.rids.append(self.world.gateway.submit(self.prompt(), OUTPUT))
        started_s = time.thread_time()
        self.world.step_control()
        self.control_s.append(time.thread_time() - started_s)
        self.world.step_executor()
        self.world.gateway.listen()

    def prompt(self) -> list[int]:
        if self.prompts and self.rng.random() < 0.25:
            return self.rng.choice(self.prompts)
        self.prompts = [*self.prompts[-64:], [self.rng.randrange(4096) for _ in range(PROMPT)]]
        return self.prompts[-1]


def measure(seed: int, profile: cProfile.Profile | None = None) -> tuple[float, float, int]:
    """(microseconds of control a step in the mean and in the median, requests that ended)."""
    load = Load(seed)
    for _ in range(WARM_STEPS):
        load.step()
    load.control_s.clear()
    if profile is not None:
        profile.enable()
    for _ in range(STEPS):
        load.step()
    if profile is not None:
        profile.disable()
    ended = sum(bool(heard.terminals) for heard in load.world.gateway.heard.values())
    return statistics.mean(load.control_s) * 1e6, statistics.median(load.control_s) * 1e6, ended


def main() -> None:
    rounds = [measure(seed) for seed in range(ROUNDS)]
    step_us = statistics.median(us for us, _, _ in rounds)
    profile = cProfile.Profile()
    measure(0, profile)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    wanted = ("keys", "_admit", "serve", "advance", "note", "open", "publish", "close", "flush", "report")
    parts = {
        f"{file.rpartition('/')[2]}:{name}": round(times[3] / STEPS * 1e6, 1)
        for (file, _, name), times in stats.items()
        if name in wanted and "/actors/" in file
    }
    found = {
        "control_cost": "a token step of 128 streams",
        "command": "python -m tests.sim.control_cost",
        "streams": STREAMS,
        "prompt": PROMPT,
        "output": OUTPUT,
        "control_us_a_step": [round(us, 1) for us, _, _ in rounds],
        "control_us_of_the_median_step": [round(us, 1) for _, us, _ in rounds],
        "ended": [ended for _, _, ended in rounds],
        "token_ms": round(TOKEN_MS, 2),
        "share_of_a_token": round(step_us / 1e3 / TOKEN_MS, 4),
        "profiled_us_a_step_with_callees": dict(sorted(parts.items(), key=lambda item: -item[1])),
    }
    for name, us in found["profiled_us_a_step_with_callees"].items():  # type: ignore[attr-defined]
        print(f"{us:10.1f} us  {name}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
