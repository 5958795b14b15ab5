"""The command line: finds the command, imports its module, runs `main(argv)`. Loads nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import epicycle
from epicycle.tools.commands import COMMANDS, usage


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. 2 for an unknown one, as argparse does."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["-h" | "--help" | "help", *_]:
            print(usage())
            return 0
        case ["--version", *_]:
            print(epicycle.__version__)
            return 0
        case [name, *rest] if name in COMMANDS:
            module, _ = COMMANDS[name]
            return int(import_module(module).main(rest))
        case [name, *_]:
            print(f"epicycle: {name!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
