"""`epicycle exit-table`: what the exit threshold costs and saves on the embedded Ouro model.

For every threshold: loops per token and held-out loss, computed densely and exactly (train_score), so they hold for
every serving configuration; and tokens a second through the engine's own pump, measured side by side in one run, the
thresholds taking turns, medians over the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from epicycle.engine.models.locate import locate

if TYPE_CHECKING:
    from epicycle.tools.train_score import Score

THRESHOLDS = (0.5, 0.7, 0.9, 1.0)
MODEL = "embedded:ouro"
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from epicycle.tools.train_score import score

    folder = locate(args.model).folder
    ids = np.load(args.heldout or folder / "heldout.npy")
    scores = [score(folder, ids, threshold) for threshold in args.thresholds]
    prompts = [row[:PROMPT_TOKENS].tolist() for row in ids[:: max(1, len(ids) // args.requests)]]
    speeds = measure_speeds(args, prompts)
    load = f"{len(prompts)} requests, {args.streams} at a time, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out"
    print(f"{scores[0].tokens:,} held-out tokens, min_loops 1, float32; speed: {load}\n")
    print(render(scores, speeds) + "\n")
    rows = [asdict(one) | {"tokens_per_s": speed} for one, speed in zip(scores, speeds, strict=True)]
    print(json.dumps({"exit_table": rows, "model": folder.name, "streams": args.streams}))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle exit-table", description=__doc__)
    made.add_argument("--model", default=MODEL, help="Ouro-style checkpoint: a name or a folder")
    made.add_argument("--heldout", type=Path, help="token windows (.npy); default: heldout.npy of the model folder")
    made.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS, help="1.0 = full depth, put it last")
    made.add_argument("--streams", type=int, default=8, help="requests in flight when measuring speed")
    made.add_argument("--requests", type=int, default=24, help="requests of one round, from windows of every source")
    made.add_argument("--rounds", type=int, default=3, help="rounds of the speed measurement")
    return made


def measure_speeds(args: argparse.Namespace, prompts: list[list[int]]) -> list[list[float]]:
    """Tokens a second of each round, by threshold: prefill and decode, a finished request replaced at once."""
    from epicycle.engine.engine import Engine
    from epicycle.tools.offline import Offline, Request
    from epicycle.transport.config import EngineConfig
    from epicycle.transport.wire.request import LoopBounds, Sampling

    offline = Offline(Engine.load(EngineConfig(model=args.model, slots=args.streams)))
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0)

    def tokens_per_s(threshold: float) -> float:
        loops = LoopBounds(min_loops=1, exit_threshold=threshold)
        requests = [Request(prompt=prompt, sampling=sampling, loops=loops) for prompt in prompts]
        replies = offline.run(requests, args.streams)
        seconds = max(reply.token_s[-1] for reply in replies) - replies[0].submitted_s
        return sum(len(reply.tokens) for reply in replies) / seconds

    tokens_per_s(1.0)  # warm-up
    rounds = [[tokens_per_s(threshold) for threshold in args.thresholds] for _ in range(args.rounds)]
    return [list(column) for column in zip(*rounds, strict=True)]


def render(scores: Sequence[Score], speeds: Sequence[Sequence[float]]) -> str:
    """A markdown table, one row per threshold; loss and speed are also compared with the last row."""
    full, base = scores[-1].loss_nats, statistics.median(speeds[-1])
    lines = [
        "| threshold | loops per token | loss, nats per token | against full depth | tokens/s | against full depth |",
        "|---|---|---|---|---|---|",
    ]
    for one, rounds in zip(scores, speeds, strict=True):
        speed = statistics.median(rounds)
        loss = f"{one.loss_nats:.4f} | {one.loss_nats - full:+.4f}"
        lines.append(f"| {one.threshold} | {one.mean_loops:.2f} | {loss} | {speed:.0f} | {speed / base:.2f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
