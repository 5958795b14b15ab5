"""Says on stderr how far loading has come, with seconds, so that a long start isn't a silent one. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def progress() -> Callable[[str], None]:
    """A function that prints a stage beside the seconds since this call."""
    started_s = time.monotonic()

    def tell(stage: str) -> None:
        print(f"  {time.monotonic() - started_s:6.1f} s  {stage}", file=sys.stderr, flush=True)

    return tell
