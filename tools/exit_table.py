"""Print what the exit threshold costs and saves: loops per token and held-out loss of the embedded Ouro model.

    python -m epicycle.tools.exit_table

Owns the command line and the table. Loss and loops are computed densely and exactly (train_score), so they hold for
every serving configuration; speed is measured elsewhere. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from epicycle.tools.train_score import Score

THRESHOLDS = (0.5, 0.7, 0.9, 1.0)
EMBEDDED = Path(__file__).resolve().parent.parent / "engine" / "models" / "embedded" / "ouro-tiny"


def render(scores: Sequence[Score]) -> str:
    """A markdown table, one row per threshold; the loss difference is against the last row."""
    full = scores[-1].loss_nats
    lines = [
        "| threshold | loops per token | loss, nats per token | against full depth | leaves after loop 1, 2, ... |",
        "|---|---|---|---|---|",
    ]
    for one in scores:
        leaves = " / ".join(f"{share:.1%}" for share in one.leaves)
        cells = (f"{one.threshold}", f"{one.mean_loops:.3f}", f"{one.loss_nats:.4f}", f"{one.loss_nats - full:+.4f}")
        lines.append(f"| {' | '.join(cells)} | {leaves} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="exit_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="Ouro-style checkpoint folder")
    parser.add_argument("--heldout", type=Path, help="token windows (.npy); default: heldout.npy of the model folder")
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS, help="1.0 = full depth, put it last")
    args = parser.parse_args(argv)
    from epicycle.tools.train_score import score

    ids = np.load(args.heldout or args.model / "heldout.npy")
    scores = [score(args.model, ids, threshold) for threshold in args.thresholds]
    print(f"{scores[0].tokens:,} held-out tokens, min_loops 1, float32\n")
    print(render(scores) + "\n")
    print(json.dumps({"exit_table": [asdict(one) for one in scores], "model": args.model.name}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
