"""`epicycle health`: the supervisor's view of a running server as a table or JSON.

Speaks to the supervisor and not to HTTP, so it works while the HTTP loop is wedged, and never waits longer than its
deadline. Exit code: 0 healthy, 1 degraded, 2 dead or unreachable.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec

from epicycle.tools.health_transfers import transfer_lines
from epicycle.transport.client import ask_health
from epicycle.transport.errors import TransportError
from epicycle.transport.rundir import find_instance
from epicycle.transport.wire.control import ActorHealth, HealthReply

EXIT_CODES = {"healthy": 0, "degraded": 1, "dead": 2}
UNREACHABLE = 2
CLEAR_SCREEN = "\x1b[H\x1b[2J"
COLUMNS = (
    *("actor", "pid", "state", "epoch", "restarts", "beat ms", "progress ms"),
    *("mailbox", "rejects", "in flight", "RSS MiB", "VRAM MiB", "hop ms", "last error"),
)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if not arguments.watch:
        return _once(arguments)
    try:
        while True:
            print(CLEAR_SCREEN if sys.stdout.isatty() and not arguments.json else "", end="")
            _once(arguments)
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epicycle health", description=__doc__)
    parser.add_argument("--port", type=int, help="HTTP port of the server; default: the only live one")
    parser.add_argument("--run-dir", help="run directory of the server")
    parser.add_argument("--json", action="store_true", help="print the reply as one JSON line")
    parser.add_argument("--deep", action="store_true", help="ping every actor through its own mailbox")
    parser.add_argument("--watch", action="store_true", help="ask again and again until Ctrl-C")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between asks (default: 1)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="deadline (default: 5)")
    return parser


def _once(arguments: argparse.Namespace) -> int:
    try:
        instance = find_instance(arguments.port, arguments.run_dir)
        address = instance.endpoints["supervisor"]
        reply = asyncio.run(ask_health(address, is_deep=arguments.deep, timeout_s=arguments.timeout))
    except TransportError as error:
        return _unreachable(str(error), arguments.json)
    print(_as_json(reply) if arguments.json else table(reply, instance.port), flush=True)
    return EXIT_CODES[reply.status]


def _unreachable(text: str, is_json: bool) -> int:
    if is_json:
        print(msgspec.json.encode({"status": "unreachable", "problems": [text]}).decode(), flush=True)
    print(f"epicycle health: {text}", file=sys.stderr, flush=True)
    return UNREACHABLE


def _as_json(reply: HealthReply) -> str:
    """Objects with names, not the wire's arrays."""
    actors = [_named(actor) | {"mailboxes": [_named(box) for box in actor.mailboxes]} for actor in reply.actors]
    return msgspec.json.encode(_named(reply) | {"actors": actors}).decode()


def _named(struct: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def table(reply: HealthReply, port: int) -> str:
    """The reply for people: one line for the instance, one per actor, one per executor that transfers, and problems."""
    rows = [COLUMNS, *(_row(actor) for actor in reply.actors)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = f"{reply.status}: port {port}, instance {reply.instance_state}, {reply.restarts_total} restarts"
    notes = [*transfer_lines(reply.actors), *(f"! {problem}" for problem in reply.problems)]
    return "\n".join([head, *lines, *notes])


def _row(actor: ActorHealth) -> tuple[str, ...]:
    vram = actor.counters.get("vram_bytes", 0.0)  # an executor's; 0 without a device
    error = f"{actor.last_error} ({actor.last_error_age_ms / 1000:.0f} s ago)" if actor.last_error else "-"
    return (
        actor.name,
        str(actor.pid or "-"),
        actor.state,
        str(actor.epoch),
        str(actor.restarts),
        _ms(actor.beat_age_ms),
        _ms(actor.progress_age_ms),
        str(actor.mailbox_depth),
        str(actor.mailbox_rejected),
        str(actor.in_flight),
        f"{actor.rss_bytes / 2**20:.0f}",
        f"{vram / 2**20:.0f}" if vram else "-",
        _ms(actor.hop_ms, digits=2),
        error,
    )


def _ms(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}f}" if value >= 0 else "-"
