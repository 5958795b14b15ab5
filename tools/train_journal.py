"""The clock and the written record of a training run: progress lines and the share of a stage that is done.

Owns log.txt. Must not know what is being trained.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO


class Journal:
    """Timestamped lines on the terminal and in log.txt; seconds count from when the journal was opened."""

    def __init__(self, path: Path) -> None:
        self._start_s = time.monotonic()
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def say(self, text: str) -> None:
        line = f"[{self.elapsed_s():6.1f}s] {text}"
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class Stage:
    """Progress of one stage that ends at a moment of the journal's clock, or after `max_steps` (0 = no limit).

    The first `warm_steps` (compilation) take time from the stage but don't count as progress.
    """

    def __init__(self, journal: Journal, end_s: float, max_steps: int, warm_steps: int = 0) -> None:
        self._journal = journal
        self._start_s = journal.elapsed_s()
        self._end_s = end_s
        self._max_steps = max_steps
        self._warm_steps = warm_steps
        self.steps = 0

    def progress(self) -> float:
        """0 at the start, 1 or more when the stage is over."""
        now_s = self._journal.elapsed_s()
        if now_s >= self._end_s or (self._max_steps and self.steps >= self._max_steps):
            return 1.0
        if self.steps < self._warm_steps:
            return 0.0
        by_clock = (now_s - self._start_s) / (self._end_s - self._start_s)
        return max(by_clock, self.steps / self._max_steps if self._max_steps else 0.0)

    def is_open(self) -> bool:
        return self.progress() < 1.0

    def count_step(self) -> None:
        self.steps += 1
        if self.steps == self._warm_steps:
            self._start_s = min(self._journal.elapsed_s(), self._end_s - 1e-3)


class Ticker:
    """Prints a line of figures at most every `every_s` seconds, and stops a run that has diverged."""

    def __init__(self, journal: Journal, every_s: float) -> None:
        self._journal = journal
        self._every_s = every_s
        self._last_s = journal.elapsed_s()

    def is_due(self) -> bool:
        """Whether a line should be printed; figures are worth fetching from the device only then."""
        return self._journal.elapsed_s() - self._last_s >= self._every_s

    def say(self, prefix: str, figures: dict[str, float]) -> None:
        """Print the figures. Raises FloatingPointError when one isn't finite."""
        lost = [name for name, value in figures.items() if not math.isfinite(value)]
        if lost:
            raise FloatingPointError(f"{prefix}: {', '.join(lost)} not finite; lower --muon-lr or --adam-lr")
        self._journal.say(f"{prefix}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        self._last_s = self._journal.elapsed_s()
