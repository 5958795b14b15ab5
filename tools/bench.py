"""`epicycle bench`: the named workloads on an engine in this process, or over HTTP, beside their computed floor.

Loading, capture and one warm-up run are left out; figures are medians over the repeats, every run is kept. The last
line is JSON; --out also writes it to a file, with pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from epicycle.engine.errors import EngineError
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import locate
from epicycle.engine.models.spec import ModelSpec
from epicycle.kvstore.errors import KvError
from epicycle.tools import bench_facts, bench_plots, bench_report
from epicycle.tools.bench_http import HttpError, model_card, run_http
from epicycle.tools.bench_load import Load, Record
from epicycle.tools.bench_sides import NAMES as SIDES
from epicycle.tools.bench_sides import Side, equal_outputs, ratios, read_side
from epicycle.tools.bench_stats import RunResult
from epicycle.tools.bench_workload import ModelEntry, Workload, WorkloadError, WorkloadFile, read_workloads
from epicycle.tools.engine_options import parse_options, read_options
from epicycle.tools.floors import Floors, rates_of
from epicycle.tools.local_server import local_server
from epicycle.tools.progress import progress

PROFILE_SEED = 0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """One run: its name, and what an engine is told besides the load."""

    name: str
    prefix_cache: bool
    measures_decode: bool


Run = Callable[[Load, RunOrder], RunResult]


class Served(msgspec.Struct, frozen=True):
    """What runs a workload's loads, and the facts of it that figures need. `profile` tells where the time goes.
    `products` are what a start on a GPU chose by its own times, which explains some of how two starts differ."""

    run: Run
    device: str
    dtype: str
    plan: str = ""
    products: dict[str, dict[str, str]] = {}
    profile: Callable[[Workload], dict[str, Any]] | None = None


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        read = read_workloads(arguments.file)
        if not arguments.workload:
            print("\n".join(read.workloads))
            return 0
        report = bench(read, arguments)
    except (WorkloadError, EngineError, KvError, HttpError, OSError, RuntimeError) as error:
        print(f"epicycle bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle bench", description=__doc__)
    made.add_argument("--workload", nargs="+", default=[], metavar="NAME", help="which to run; without: list them")
    made.add_argument("--file", type=Path, help="workloads of your own, in the packaged file's form")
    made.add_argument("--mode", choices=("engine", "http"), default="engine", help="http adds text and messages")
    made.add_argument("--target", metavar="URL", help="http: a running server; without: one is started")
    made.add_argument("--model", help="embedded model, shipped config, or folder; default: the workload's")
    made.add_argument("--weights", choices=("auto", "random"), help="default: the workload's")
    made.add_argument("--dtype", choices=("auto", *DTYPE_BYTES), help="default: the workload's")
    made.add_argument("--device", default="auto", help="auto, cpu, or cuda:N")
    made.add_argument("--repeats", type=at_least_one, help="timed runs of each workload; default: the file's")
    made.add_argument("--no-warm-up", action="store_true", help="count the first run too: for loads that take minutes")
    made.add_argument(
        "--profile", action="store_true", help="engine: tell the time of every kernel, in a run of its own"
    )
    made.add_argument("--no-decode-window", action="store_true", help="engine: leave out the pass that only decodes")
    made.add_argument(
        "--beside", nargs="+", default=[], metavar="SIDE",
        help=f"run each workload so too, in turn, and tell the ratios: {', '.join(SIDES)}, or OPTION=VALUE",
    )  # fmt: skip
    made.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt whole")
    made.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="any other engine option")
    made.add_argument("--bandwidth", type=float, default=0.0, help="bytes/s for the floor, such as 4.2e12")
    made.add_argument("--flops", type=float, default=0.0, help="operations/s for the floor, such as 755e12")
    made.add_argument("--out", type=Path, metavar="DIR", help="write bench.json and pictures there")
    return made


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def bench(read: WorkloadFile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every workload asked for, printing and keeping each as it is done; returns the report."""
    chosen = [read.pick(name) for name in arguments.workload]
    facts: dict[str, Any] = {"commit": bench_facts.commit(), "versions": bench_facts.versions()}
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"mode {arguments.mode}, commit {facts['commit'] or 'unknown'}, {versions}\n", flush=True)
    report = {"bench": "workloads", "mode": arguments.mode, "target": arguments.target, **facts, "results": []}
    for workload in chosen:
        result = bench_one(read, workload, arguments)
        report["results"].append(result)
        print(f"{result['device']}, {result['dtype']}. {result['plan']}")
        print(bench_report.render(result) + "\n", flush=True)
        if arguments.out is not None:
            write(report, arguments.out)
    return report


def bench_one(read: WorkloadFile, workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """The workload, and each side it is run beside: on the same engine in turn, or on one of the side's own."""
    entry = chosen_model(read.model_of(workload), arguments)
    options = engine_options(workload, entry, read.defaults.page_tokens, arguments)
    spec = read_spec(locate(options["model"], "random").folder)
    spec = replace(spec, loops=options.get("loops") or spec.loops)
    if workload.longest_tokens > spec.context_tokens:
        text = f"{workload.name}: a request of {workload.longest_tokens} tokens is longer than the"
        raise WorkloadError(f"{text} {spec.context_tokens} that {options['model']} has positions for")
    plain = Side(prefix_cache=not arguments.no_prefix_cache)
    sides = [read_side(text) for text in arguments.beside]
    here = [plain, *(side for side in sides if not side.options)]
    about, results = bench_sides(read, workload, spec, options, here, arguments)
    for side in sides:
        if side.options:
            results |= bench_sides(read, workload, spec, options | side.options, [side], arguments)[1]
    first, runs = results[""]
    beside = {
        name: side | {"ratios": ratios(first["median"], side["median"]), "outputs": equal_outputs(runs, side_runs)}
        for name, (side, side_runs) in results.items()
        if name
    }
    return about | first | {"beside": beside}


Results = dict[str, tuple[dict[str, Any], list[Record]]]  # by side: figures, and the last run's records


def bench_sides(
    read: WorkloadFile,
    workload: Workload,
    spec: ModelSpec,
    options: dict[str, Any],
    sides: list[Side],
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], Results]:
    """All sides of one engine, run by run in turn; the first run of each warms up. Also what was served."""
    repeats = read.defaults.repeats if arguments.repeats is None else arguments.repeats
    changed = [side.changed(workload) for side in sides]
    timed: dict[str, list[RunResult]] = {side.name: [] for side in sides}
    serve = engine_side if arguments.mode == "engine" else http_side
    with serve(options, arguments) as served:
        for number in range(1 if arguments.no_warm_up else 0, repeats + 1):
            for side, load in zip(sides, changed, strict=True):
                measures_decode = number > 0 and not arguments.no_decode_window and not side.left_out(workload)
                order = RunOrder(
                    name=f"run {number} {side.name}", prefix_cache=side.prefix_cache, measures_decode=measures_decode
                )
                result = served.run(Load(load, spec, read.defaults.seed, side.left_out(workload)), order)
                timed[side.name] += [result] if number else []
        more = profile_of(served, workload, sides) if arguments.profile else {}
    terms = floor_terms(spec, served, arguments)
    found = {
        side.name: (bench_report.result_of(load, timed[side.name], *terms), timed[side.name][-1].records)
        for side, load in zip(sides, changed, strict=True)
    }
    about = {"options": options, "device": served.device, "dtype": served.dtype}
    return about | {"plan": served.plan, "products": served.products} | more, found


def profile_of(served: Served, workload: Workload, sides: list[Side]) -> dict[str, Any]:
    """Of the plain side's engine."""
    if sides[0].options:
        return {}
    if served.profile is None:
        raise WorkloadError("--profile needs --mode engine")
    return {"profile": served.profile(workload)}


def chosen_model(entry: ModelEntry, arguments: argparse.Namespace) -> ModelEntry:
    """The workload's model with what the command line says instead."""
    return ModelEntry(
        config=arguments.model or entry.config,
        weights=arguments.weights or entry.weights,
        dtype=arguments.dtype or entry.dtype,
    )


def engine_options(
    workload: Workload, entry: ModelEntry, page_tokens: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Engine options by name; the workload's, then --set."""
    return {
        "model": entry.config,
        "weights": entry.weights,
        "dtype": entry.dtype,
        "device": arguments.device,
        "slots": workload.slots,
        "context_tokens": workload.context,
        "page_tokens": page_tokens,
        "exit_rule": workload.exit_rule,
    } | parse_options(arguments.set)


def floor_terms(spec: ModelSpec, served: Served, arguments: argparse.Namespace) -> tuple[Floors, Any]:
    rates = rates_of(served.device, arguments.bandwidth, arguments.flops)
    return Floors(spec, DTYPE_BYTES[served.dtype]), rates


@contextmanager
def engine_side(options: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Served]:
    """An engine in this process for as long as the block runs."""
    from epicycle.engine.engine import Engine
    from epicycle.engine.hardware import device_name, give_back_memory
    from epicycle.tools.bench_engine import run_engine
    from epicycle.tools.bench_profile import profile_windows

    give_back_memory()
    engine = Engine.load(read_options(options), progress())
    facts = engine.capabilities()
    yield Served(
        run=lambda load, order: run_engine(
            engine, load, measures_decode=order.measures_decode, prefix_cache=order.prefix_cache
        ),
        device=device_name(facts.device),
        dtype=facts.dtype,
        plan=facts.plan_line,
        products=engine.products,
        profile=lambda workload: profile_windows(engine, workload, engine.spec, PROFILE_SEED),
    )


@contextmanager
def http_side(options: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Served]:
    """The server at --target, or one of our own for as long as the block runs."""
    if "no-prefix-cache" in arguments.beside:
        raise WorkloadError(
            "--beside no-prefix-cache needs --mode engine; over HTTP use --no-prefix-cache in a run apart"
        )
    if arguments.target:
        yield served_at(arguments.target, arguments)
        return
    words = [word for name, value in options.items() for word in ("--set", f"engine.{name}={value}")]
    words += ["--no-prefix-cache"] if arguments.no_prefix_cache else []
    with tempfile.TemporaryDirectory(prefix="epicycle-bench-") as scratch, local_server(Path(scratch), words) as server:
        yield served_at(server.base_url, arguments)


def served_at(base_url: str, arguments: argparse.Namespace) -> Served:
    """Another server than ours tells neither device nor dtype: bfloat16 is assumed for its floor."""
    card = model_card(base_url)
    device = str(card.get("device", "unknown"))
    if not arguments.target:
        from epicycle.engine.hardware import device_name

        device = device_name(device)
    dtype = str(arguments.dtype or card.get("dtype", "bfloat16"))
    return Served(lambda load, order: run_http(base_url, load, order.name), device, dtype)


def write(report: dict[str, Any], folder: Path) -> None:
    """bench.json, and pictures where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    if bench_plots.can_plot():
        bench_plots.save_plots(report["results"], folder)
    else:
        print(bench_plots.MISSING, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
