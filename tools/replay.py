"""`epicycle replay`: a trace of sessions, against a server of ours or any OpenAI endpoint.

Reads native, Mooncake, aiperf, Bailian, BurstGPT, Azure, ShareGPT, TraceLab and Weka traces, plain, gzip or zstd, and
sends their requests with their waits and dependencies. The last line of standard output is JSON; --out writes a row for
each request, --report a page for people. docs/replay.md is the tutorial.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from epicycle.tools.replaying.errors import Faults, ReplayError
from epicycle.tools.replaying.figures import Slo
from epicycle.tools.replaying.formats.registry import FORMATS
from epicycle.tools.replaying.prompts import DEFAULT_OUTPUT, BodyOptions
from epicycle.tools.replaying.run import Plan, replay, target_at
from epicycle.tools.replaying.schedule import READ_AHEAD
from epicycle.tools.replaying.source import Limits
from epicycle.tools.replaying.timing import Timing
from epicycle.tools.replaying.trace import TraceRows, open_trace, open_workload

CLOSED_CONCURRENCY = 16


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.list_formats:
        print("\n".join(f"{name:18} {one.about}; times: {one.times}" for name, one in FORMATS.items()))
        return 0
    try:
        plan = plan_of(arguments)
        with target_at(arguments.target, plan, arguments.timeout_s, arguments.api_key, arguments.speaks) as target:
            summary = uvloop.run(replay(plan, target))
    except (ReplayError, OSError, RuntimeError) as error:
        print(f"epicycle replay: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("epicycle replay: interrupted", file=sys.stderr)
        return 130
    for warning in summary["warnings"]:
        print(f"epicycle replay: {warning}", file=sys.stderr)
    print(json.dumps(summary))
    return 130 if summary["is_interrupted"] else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle replay", description=__doc__)
    made.add_argument("trace", nargs="*", type=Path, metavar="TRACE", help=(
        "files, read one after the other, or shipped:chat, shipped:tool-agent, shipped:long-context"
    ))  # fmt: skip
    made.add_argument("--target", metavar="URL", help="http://HOST:PORT, zmq://, zmq://PORT or zmq:///RUN/DIR")
    made.add_argument("--format", choices=("auto", *FORMATS), default="auto", help="auto: by the file's beginning")
    made.add_argument("--list-formats", action="store_true", help="say what each format is")
    made.add_argument("--workload", metavar="NAME", help="a workload of `epicycle bench` instead of a trace")
    made.add_argument("--file", type=Path, help="workloads of your own, in the packaged file's form")
    _schedule_options(made.add_argument_group("schedule"))
    _request_options(made.add_argument_group("requests"))
    _reading_options(made.add_argument_group("reading"))
    _record_options(made.add_argument_group("record"))
    return made


def _schedule_options(group: Any) -> None:
    group.add_argument("--schedule", choices=("closed", "trace", "rate"), default="closed", help=(
        "closed: so many conversations at once; trace: at the trace's times; rate: so many begun a second"
    ))  # fmt: skip
    group.add_argument("--concurrency", type=at_least(0), metavar="N", help=(
        f"conversations under way at once, 0: no limit; default {CLOSED_CONCURRENCY} when closed, else 0"
    ))  # fmt: skip
    group.add_argument("--rate", type=positive, default=1.0, metavar="R", help="conversations begun a second")
    group.add_argument("--ramp-s", type=positive, default=0.0, metavar="S", help=(
        "closed: the first conversations begin one after the other within this"
    ))  # fmt: skip
    group.add_argument("--even-rate", action="store_true", help="at equal distances instead of Poisson's")
    group.add_argument("--time-scale", type=positive, default=1.0, metavar="F", help="every gap is F times as long")
    group.add_argument("--gap-cap-s", type=positive, default=0.0, metavar="S", help="no gap is longer")
    group.add_argument("--ignore-delays", action="store_true", help="turns follow at once")
    group.add_argument("--conversations", type=at_least(1), metavar="N", help="only the first N")
    group.add_argument("--requests", type=at_least(1), metavar="N", help="only the first N rows")
    group.add_argument("--on-error", choices=("stop-session", "continue"), default="stop-session", help=(
        "after a failed turn: leave the rest of its conversation out, or go on without what it said"
    ))  # fmt: skip


def _request_options(group: Any) -> None:
    group.add_argument("--model", default="", help="of several that the target serves; default: its first")
    group.add_argument("--api-key", default="", help="sent as the bearer token")
    group.add_argument("--speaks", choices=("auto", "epicycle", "vllm", "plain"), default="auto", help=(
        "what bodies may carry beyond OpenAI's fields; auto: as the model card lets guess"
    ))  # fmt: skip
    group.add_argument("--vocab-size", type=at_least(1), default=0, help="where the target doesn't tell")
    group.add_argument("--salt", help="of made-up prompts and the server's cache; default: fresh, so no run is warm")
    group.add_argument("--output", choices=("trace", "exact", "cap"), default="trace", help="whether EOS ends answers")
    group.add_argument("--default-osl", type=at_least(1), default=DEFAULT_OUTPUT, help="where a row names no length")
    group.add_argument("--max-isl", type=at_least(1), default=0, help="longest prompt in tokens (not for text)")
    group.add_argument("--max-osl", type=at_least(1), default=0, help="longest output in tokens")
    group.add_argument("--over", choices=("drop", "cap"), default="drop", help="what happens to rows over them")
    group.add_argument("--exit-traces", choices=("auto", "always", "never"), default="auto", help=(
        "send recorded exit depths; auto: where the server's exit rule is trace"
    ))  # fmt: skip
    group.add_argument("--pin-sessions", action="store_true", help="send session_id, so that tool gaps keep the cache")
    group.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="into every body")
    group.add_argument("--timeout-s", type=positive, default=600.0, help="longest a request may take")


def _reading_options(group: Any) -> None:
    group.add_argument("--on-bad-row", choices=("stop", "skip"), default="stop", help="skip: count and go on")
    group.add_argument("--read-ahead", type=at_least(1), default=READ_AHEAD, metavar="ROWS", help=(
        "rows held beyond those that ended; who waits for a later row must find it among them"
    ))  # fmt: skip
    group.add_argument("--max-line-mib", type=positive, default=8.0, help="longest line")
    group.add_argument("--max-growth", type=positive, default=200.0, help="most times a file may grow unpacked")


def _record_options(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="JSONL, one row a request")
    group.add_argument("--report", type=Path, metavar="FILE", help="HTML with plots, one file")
    group.add_argument("--slo-ttft-ms", type=positive, default=0.0, help="goodput: first token within")
    group.add_argument("--slo-tpot-ms", type=positive, default=0.0, help="goodput: mean step within")
    group.add_argument("--slo-e2e-ms", type=positive, default=0.0, help="goodput: whole answer within")
    group.add_argument(
        "--max-lag-ms", type=positive, default=1000.0, help="a p99 schedule lag above makes a run invalid"
    )
    group.add_argument("--no-progress", action="store_true", help="no bar on a terminal")


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Everything a run needs but its target. Raises ReplayError."""
    faults = Faults(arguments.on_bad_row)
    trace = _trace(arguments, faults)
    concurrency = _concurrency(arguments, trace)
    timing = Timing(
        mode=arguments.schedule,
        scale=arguments.time_scale,
        gap_cap_ms=1e3 * arguments.gap_cap_s,
        ignore_delays=arguments.ignore_delays,
        rate_per_s=arguments.rate,
        is_poisson=not arguments.even_rate,
        ramp_ms=1e3 * arguments.ramp_s,
        ramped=concurrency,
    )
    bodies = BodyOptions(
        salt=arguments.salt or secrets.token_hex(8),
        max_prompt=arguments.max_isl,
        max_output=arguments.max_osl,
        over=arguments.over,
        output_mode=arguments.output,
        default_output=arguments.default_osl,
        exit_traces=arguments.exit_traces,
        pins_sessions=arguments.pin_sessions,
        fields=fields_of(arguments.set),
    )
    return Plan(
        trace=trace,
        faults=faults,
        timing=timing,
        bodies=bodies,
        concurrency=concurrency,
        stops_sessions=arguments.on_error == "stop-session",
        read_ahead=arguments.read_ahead,
        model=arguments.model,
        vocabulary=arguments.vocab_size,
        slo=Slo(ttft_ms=arguments.slo_ttft_ms, tpot_ms=arguments.slo_tpot_ms, e2e_ms=arguments.slo_e2e_ms),
        max_lag_ms=arguments.max_lag_ms,
        out=arguments.out,
        report=arguments.report,
        shows_progress=not arguments.no_progress,
    )


def _concurrency(arguments: argparse.Namespace, trace: TraceRows) -> int:
    if arguments.concurrency is not None:
        return int(arguments.concurrency)
    if arguments.schedule != "closed":
        return 0
    return trace.concurrency if arguments.workload else CLOSED_CONCURRENCY


def _trace(arguments: argparse.Namespace, faults: Faults) -> TraceRows:
    if bool(arguments.trace) == bool(arguments.workload):
        raise ReplayError("give TRACE files or --workload NAME, one of both")
    if arguments.workload:
        trace = open_workload(arguments.workload, arguments.file)
    else:
        limits = Limits(line_bytes=int(arguments.max_line_mib * (1 << 20)), growth=arguments.max_growth)
        trace = open_trace(arguments.trace, arguments.format, limits, faults)
    if arguments.conversations is not None:
        trace.keep_conversations(arguments.conversations)
    if arguments.requests is not None:
        trace.rows = islice(trace.rows, arguments.requests)
    return trace


def fields_of(pairs: list[str]) -> dict[str, Any]:
    """`--set` pairs; a value that is no JSON is text. Raises ReplayError."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ReplayError(f"--set {pair!r}: use FIELD=JSON")
        try:
            found[name] = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError):
            found[name] = text
    try:
        msgspec.json.encode(found)
    except UnicodeError as error:
        raise ReplayError(f"--set: {error}") from None
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
