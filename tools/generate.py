"""`epicycle generate PROMPT`: one answer, token by token, with a bar that shows how many loops each token took.

Uses the running server when there is one, else starts one of its own for this answer. It speaks the embeddable
client's protocol and knows nothing of HTTP. On a terminal every token is coloured by its depth and followed by its bar;
elsewhere the text alone goes to stdout and the summary to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from epicycle.tools.local_server import local_server
from epicycle.transport.client import Client
from epicycle.transport.errors import ClientError, RunDirError
from epicycle.transport.results import StreamEvent
from epicycle.transport.rundir import find_instance

BARS = "▁▂▃▄▅▆▇█"
# From shallow to deep, 256-colour codes: green, through yellow, to red.
COLOURS = (35, 71, 107, 143, 179, 173, 167, 161)


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        with client_for(arguments) as client:
            return show(client, arguments)
    except (ClientError, RunDirError, RuntimeError) as error:
        print(f"epicycle generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="epicycle generate", description=__doc__)
    made.add_argument("prompt", help="what to continue, or the user's message with --chat")
    made.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    made.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    made.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    made.add_argument("--seed", type=int, help="seed of the sampling")
    made.add_argument("--exit-threshold", type=float, help="leave the loops earlier below 1; default: the model's")
    made.add_argument("--min-loops", type=int, help="loops every token runs at least")
    made.add_argument("--max-loops", type=int, help="loops a generated token runs at most")
    made.add_argument("--model", default="embedded:ouro", help="model of the server started when none runs")
    made.add_argument("--port", type=int, help="HTTP port of the server to use")
    made.add_argument("--run-dir", help="run directory of the server to use")
    made.add_argument("--no-colour", action="store_true", help="plain text even on a terminal (also: NO_COLOR)")
    return made


@contextlib.contextmanager
def client_for(arguments: argparse.Namespace) -> Iterator[Client]:
    """A client of the server asked for, of the only one that runs, or of one started here."""
    is_named = arguments.port is not None or arguments.run_dir is not None
    if is_named or has_instance():
        with Client(port=arguments.port, run_dir=arguments.run_dir) as client:
            yield client
        return
    print(f"no server runs; starting one with {arguments.model}", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="epicycle-") as scratch,
        local_server(Path(scratch), ["--model", arguments.model]) as server,
        Client(run_dir=server.run_dir) as client,
    ):
        yield client


def has_instance() -> bool:
    """False only when no server runs; several are an error that lists them."""
    try:
        find_instance()
    except RunDirError as error:
        if error.code == "no_instance":
            return False
        raise
    return True


def show(client: Client, arguments: argparse.Namespace) -> int:
    """Stream the answer to the terminal, then its summary."""
    is_coloured = sys.stdout.isatty() and not arguments.no_colour and "NO_COLOR" not in os.environ
    parameters = {
        name: value
        for name in ("max_tokens", "temperature", "seed", "exit_threshold", "min_loops", "max_loops")
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.chat:
        stream = client.stream_chat([{"role": "user", "content": arguments.prompt}], **parameters)
    else:
        stream = client.stream(arguments.prompt, **parameters)
    depths: list[int] = []
    for event in stream:
        depths += event.exit_depths
        print(painted(event, max(depths, default=1)) if is_coloured else event.text, end="", flush=True)
    print()
    print(summary(depths), file=sys.stderr)
    return 0


def painted(event: StreamEvent, loops: int) -> str:
    """The event's text in the colour of its depth, then one bar per token. The first output ran all `loops`."""
    bars = "".join(coloured(bar(depth, loops), depth, loops) for depth in event.exit_depths)
    deepest = max(event.exit_depths, default=0)
    return coloured(event.text, deepest, loops) + bars if event.exit_depths else event.text


def bar(depth: int, loops: int) -> str:
    return BARS[step(depth, loops, len(BARS))]


def coloured(text: str, depth: int, loops: int) -> str:
    return f"\x1b[38;5;{COLOURS[step(depth, loops, len(COLOURS))]}m{text}\x1b[0m" if text else ""


def step(depth: int, loops: int, steps: int) -> int:
    """Where `depth` of `loops` lies among `steps` even steps, the deepest on the last."""
    return max(0, min(steps, -(-depth * steps // loops)) - 1)


def summary(depths: list[int]) -> str:
    """Tokens, mean loops, and the share of loops that early exit saved. Entry 0 ran the model's full depth."""
    if not depths:
        return "no tokens"
    full = depths[0] * len(depths)
    mean = sum(depths) / len(depths)
    saved = 100 * (1 - sum(depths) / full)
    return f"{len(depths)} tokens, {mean:.2f} of {depths[0]} loops a token, {saved:.0f} % of the loops saved"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
