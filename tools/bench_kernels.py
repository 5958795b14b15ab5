"""`epicycle bench-kernels`: check, tune and time every GPU kernel on one card, and whole loops of both models.

Prints a table and writes everything as JSON to --out. Needs torch, Triton and a GPU, and the installed package or a
path to it. A run is bounded by --seconds: sections that would start late are left out and named.

    python tools/bench_kernels.py --out kernels.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

PARTS = ("ouro", "checks", "huginn", "beside", "flash")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="where the JSON report goes")
    parser.add_argument("--seconds", type=float, default=450.0, help="leave out sections that would end later")
    parser.add_argument("--part", choices=PARTS, action="append", help="run this alone, in this process")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    from epicycle.engine.kernels.bench import suite, warm

    if options.warm:
        index, of = options.warm.split("/")
        warm.warm(int(index), int(of))
    elif options.part:
        suite.run_here(options.part, options.out, options.seconds)
    else:
        suite.run_parts((sys.executable, str(Path(__file__).resolve())), options.out, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
