"""Makes the three synthetic traces that ship in tools/traces: chat, tool-agent, long-context.

    python -m epicycle.tools.make_traces [DIR]
    python -m epicycle.tools.make_traces --crowd 64 20 DIR    # crowd.jsonl: so many conversations of so many turns

They fit the embedded models' context of 1,024 tokens. Everything follows from one seed, so the files can be made again
bit by bit.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from epicycle.transport.trace_rows import TraceRow, encode_row

SEED = 20261129
SHIPPED = Path(__file__).parent / "traces"
QUESTIONS = (
    "What does {} mean?",
    "Use the word {} in a sentence.",
    "Tell me a story about a {}.",
    "What is a {}?",
)
WORDS = ("happy", "river", "fox", "garden", "brave", "moon", "bread", "quiet", "boat", "winter", "letter", "kind")
AFTERWARDS = (
    "Thank you. Can you say that more simply?",
    "And what is the opposite?",
    "Give me another example.",
    "How do I make tea?",
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHIPPED, metavar="DIR")
    parser.add_argument("--crowd", nargs=2, type=int, metavar=("CONVERSATIONS", "TURNS"))
    arguments = parser.parse_args(argv)
    made, folder = TRACES, arguments.folder
    if arguments.crowd:
        made = {"crowd": partial(crowd, *arguments.crowd)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in made.items():
        rows = sorted(make(random.Random(f"{SEED} {name}")), key=lambda row: row.timestamp or 0.0)
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(encode_row, rows)))
        print(f"{name}: {len(rows)} rows of {len({row.session_id for row in rows})} conversations")
    return 0


def chat(draw: random.Random) -> Iterator[TraceRow]:
    """16 people who talk in turns, think between them, and see what the model really said."""
    start_ms = 0.0
    for person in range(16):
        start_ms += draw.expovariate(1 / 250)
        at_ms = start_ms
        for turn in range(draw.randint(2, 5)):
            think_ms = round(draw.uniform(150, 900), 1) if turn else 0.0
            at_ms += think_ms + 300
            text = draw.choice(QUESTIONS).format(draw.choice(WORDS)) if turn == 0 else draw.choice(AFTERWARDS)
            yield TraceRow(
                request_id=f"chat-{person}-{turn}",
                session_id=f"chat-{person}",
                timestamp=round(at_ms, 1),
                delay=think_ms if turn else None,
                messages=[{"role": "user", "content": text}],
                message_mode="delta",
                output_length=draw.randint(16, 48),
                output_mode="cap",
            )


def tool_agent(draw: random.Random) -> Iterator[TraceRow]:
    """8 agents under one system prompt: plan, two tools, three sub-agents at once, a join, and a fresh start."""
    for agent in range(8):
        yield from _agent(draw, f"agent-{agent}", round(agent * draw.uniform(100, 300), 1))


def _agent(draw: random.Random, name: str, start_ms: float) -> Iterator[TraceRow]:
    def row(part: str, fresh: int, output: int, at_ms: float, **fields: object) -> TraceRow:
        common = {"timestamp": round(start_ms + at_ms, 1), "message_mode": "delta", "output_length": output}
        return TraceRow(request_id=f"{name}/{part}", **{"session_id": name, "input_length": fresh, **common, **fields})  # type: ignore[arg-type]

    helpers = [f"{name}/helper-{number}" for number in range(3)]
    yield row("plan", draw.randint(24, 64), draw.randint(16, 32), 0, prefix_length=192)
    for number in range(2):
        took_ms = round(draw.uniform(120, 600), 1)
        tool = {"tool_name": draw.choice(("search", "read_file", "run_tests")), "tool_wall_latency_ms": took_ms}
        branches = helpers if number else []
        fresh, output, at_ms = draw.randint(40, 96), draw.randint(12, 24), 700 * (number + 1)
        yield row(f"tool-{number}", fresh, output, at_ms, tool_wait_ms=took_ms, tool_events=[tool], branches=branches)
    for number, helper in enumerate(helpers):
        fresh, output = draw.randint(16, 48), draw.randint(16, 40)
        yield row(helper.removeprefix(f"{name}/"), fresh, output, 2100 + number, session_id=helper, wait_for=[])
    waits = [f"{name}/tool-1", *helpers]
    yield row("join", draw.randint(48, 96), draw.randint(24, 48), 3000, wait_for=waits, delay=draw.randint(20, 80))
    fresh, output = draw.randint(40, 80), draw.randint(16, 32)
    yield row("after-reset", fresh, output, 3500, prefix_reset=True, prefix_length=192, delay=50)


def long_context(draw: random.Random) -> Iterator[TraceRow]:
    """6 documents of 30 to 50 blocks, each asked four things by people who share nothing else."""
    fresh = iter(range(1, 1 << 20))
    for document in range(6):
        blocks = [next(fresh) for _ in range(draw.randint(30, 50))]
        for question in range(4):
            own = [next(fresh) for _ in range(draw.randint(1, 3))]
            yield TraceRow(
                request_id=f"document-{document}-question-{question}",
                session_id=f"reader-{document}-{question}",
                timestamp=round(400 * question + 150 * document + draw.uniform(0, 100), 1),
                hash_ids=[*blocks, *own],
                block_size=16,
                input_length=16 * (len(blocks) + len(own)) - draw.randint(0, 15),
                output_length=draw.randint(8, 24),
            )


def crowd(conversations: int, turns: int, draw: random.Random) -> Iterator[TraceRow]:
    """As many conversations as asked for, all alike, with tools that take 100 to 500 ms: a load on the client."""
    for person in range(conversations):
        for turn in range(turns):
            yield TraceRow(
                request_id=f"crowd-{person}-{turn}",
                session_id=f"crowd-{person}",
                input_length=draw.randint(16, 32),
                output_length=16,
                message_mode="delta",
                tool_wait_ms=round(draw.uniform(100, 500), 1) if turn else 0.0,
            )


TRACES: dict[str, Callable[[random.Random], Iterator[TraceRow]]] = {
    "chat": chat,
    "tool-agent": tool_agent,
    "long-context": long_context,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
