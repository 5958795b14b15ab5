"""`epicycle bench-hop`: what the host path costs beside a bare aiohttp SSE server, measured in the same run.

The mock executor makes tokens for free, so everything that is left is ours: HTTP, messages, scheduling, text. Both
sides stream one token as one event with one JSON encode, to one client in a process of its own. Rounds alternate, so
that a noisy neighbour hits both; the figure is the ratio of medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epicycle.tools.local_server import local_server

CLIENT_TIMEOUT_S = 300
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """One server under test: its port, its processes by name, and what each round gave."""

    name: str
    port: int
    pids: dict[str, int]
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="epicycle bench-hop", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per side")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="epicycle-hop-") as scratch, contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(echo_server()),
            stack.enter_context(mock_server(Path(scratch), arguments.streams)),
        ]
        for side in sides:
            measure(side, arguments.streams, arguments.tokens // 4)  # warm-up, not kept
            side.tokens_per_s.clear()
            side.cpu_us.clear()
        for _ in range(arguments.repeats):
            for side in sides:
                measure(side, arguments.streams, arguments.tokens)
    report(sides, arguments)
    return 0


@contextlib.contextmanager
def echo_server() -> Iterator[Side]:
    command = [sys.executable, "-m", "epicycle.tools.bench_echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Side("echo", int(process.stdout.readline()), {"echo": process.pid})
        process.terminate()


@contextlib.contextmanager
def mock_server(scratch: Path, streams: int) -> Iterator[Side]:
    arguments = ["--executor", "mock", "--slots", str(streams), "--log-format", "json"]
    with local_server(scratch, arguments) as server:
        yield Side("epicycle", server.port, actor_pids(server.run_dir))


def actor_pids(run_dir: Path) -> dict[str, int]:
    """Process ids by actor name, as the health command reports them."""
    command = [sys.executable, "-m", "epicycle", "health", "--json", "--run-dir", str(run_dir)]
    reply = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {actor["name"]: actor["pid"] for actor in reply["actors"]}


def measure(side: Side, streams: int, tokens: int) -> None:
    """One round: run the client against the side and note tokens a second and CPU microseconds a token."""
    before = {name: cpu_seconds(pid) for name, pid in side.pids.items()}
    command = [sys.executable, "-m", "epicycle.tools.bench_sse_client", "--port", str(side.port)]
    command += ["--streams", str(streams), "--tokens", str(tokens)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S).stdout
    result = json.loads(output)
    if result["events"] < streams * tokens:
        raise RuntimeError(f"{side.name} sent {result['events']} events for {streams} x {tokens} tokens")
    side.tokens_per_s.append(streams * tokens / result["seconds"])
    for name, pid in side.pids.items():
        spent = cpu_seconds(pid) - before[name]
        side.cpu_us.setdefault(name, []).append(1e6 * spent / (streams * tokens))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def report(sides: list[Side], arguments: argparse.Namespace) -> None:
    medians = {side.name: statistics.median(side.tokens_per_s) for side in sides}
    cpu = {name: statistics.median(values) for side in sides for name, values in side.cpu_us.items()}
    ratio = medians["epicycle"] / medians["echo"]
    for name, value in medians.items():
        print(f"{name:10} {value:10.0f} tokens/s")
    for name, value in cpu.items():
        print(f"{name:10} {value:10.1f} us of CPU per token")
    print(f"ratio      {ratio:10.2f} of the bare echo")
    result: dict[str, Any] = {
        "bench": "hop",
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "tokens_per_s": {side.name: side.tokens_per_s for side in sides},
        "median_tokens_per_s": medians,
        "cpu_us_per_token": cpu,
        "ratio": ratio,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
