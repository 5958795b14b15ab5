"""`epicycle bench-split`: a named workload on a server whose prompts and tokens are computed by different executors.

Serves the workload's model with --prefill and --decode (and whatever flags follow), runs it over HTTP, and tells beside
the usual figures what the transfers did: bytes of a prompt token, tails, segments, the share that left early. The
writes themselves are timed apart, by segment size, unless --no-link. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import locate
from epicycle.tools import bench_facts
from epicycle.tools.bench_http import HttpError, run_http
from epicycle.tools.bench_load import Load
from epicycle.tools.bench_stats import RunResult, median_of, summarise
from epicycle.tools.bench_workload import WorkloadError, read_workloads
from epicycle.tools.local_server import LocalServer, local_server

LINK = "epicycle.engine.transfer.bench"
PREFIX = "epicycle_transfer_"


def main(argv: list[str]) -> int:
    arguments, flags = parser().parse_known_args(argv)
    try:
        report = run(arguments, flags)
    except (WorkloadError, HttpError, OSError, RuntimeError) as error:
        print(f"epicycle bench-split: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="epicycle bench-split",
        description=__doc__,
        epilog="Other flags go to `epicycle serve`.",
        allow_abbrev=False,
    )
    made.add_argument("--workload", required=True, metavar="NAME", help="as in `epicycle bench`")
    made.add_argument("--prefill", default="cpu", metavar="DEVICES", help="executors that compute prompts")
    made.add_argument("--decode", default="cpu", metavar="DEVICES", help="executors that make the tokens")
    made.add_argument("--repeats", type=int, default=3, help="timed runs")
    made.add_argument("--no-link", action="store_true", help="don't time writes by segment size")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")
    return made


def run(arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    read = read_workloads(None)
    workload = read.pick(arguments.workload)
    entry = read.model_of(workload)
    spec = read_spec(locate(entry.config, "random").folder)
    serve = [
        "--model", entry.config, "--weights", entry.weights, "--dtype", entry.dtype, "--prefill", arguments.prefill,
        "--decode", arguments.decode, "--context", str(workload.context), "--slots", str(workload.slots),
        "--page-tokens", str(read.defaults.page_tokens), *flags,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="epicycle-bench-") as scratch, local_server(Path(scratch), serve) as server:
        run_http(server.base_url, Load(workload, spec, read.defaults.seed), "warm up")
        before = transfers(server)
        results = [
            run_http(server.base_url, Load(workload, spec, read.defaults.seed), f"run {number}")
            for number in range(arguments.repeats)
        ]
        after = transfers(server)
    summaries = [summarise(result) for result in results]
    moved = difference(before, after)
    prompt_tokens = sum(one.prompt_tokens for result in results for one in result.records)
    report = {
        "bench": "split",
        "workload": workload.name,
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "commit": bench_facts.commit(),
        "versions": bench_facts.versions(),
        "serve": serve,
        "median": median_of(summaries),
        "outputs": digest(results),
        "transfers": moved | {"bytes_per_prompt_token": moved["sent_bytes_total"] / prompt_tokens},
        "link": None if arguments.no_link else link(arguments.prefill, arguments.decode),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def transfers(server: LocalServer) -> dict[str, float]:
    """The transfer metrics, summed over executors."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(PREFIX):
            name, value = line.rsplit(" ", 1)
            key = name.removeprefix(PREFIX).partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the counters have counted in between; gauges as they are now."""
    return {name: value - before[name] if name.endswith("_total") else value for name, value in after.items()}


def digest(results: list[RunResult]) -> str:
    """Of all tokens of all runs: the same for whoever gives the same answers."""
    tokens = [[one.tokens for one in result.records] for result in results]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def link(prefill: str, decode: str) -> dict[str, Any]:
    """Writes by segment size between the first device of each role."""
    devices = ["--from", prefill.split(",")[0], "--to", decode.split(",")[0]]
    ended = subprocess.run([sys.executable, "-m", LINK, *devices], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the link can't be timed: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
