"""The bar on a terminal while a replay runs: requests ended and failed, rates, times. Silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from epicycle.tools.replaying.figures import Figures
from epicycle.tools.replaying.schedule import Schedule


class Bar:
    """`update` after each record; costs next to nothing where nobody looks."""

    def __init__(self, update: Callable[[Figures, Schedule], None] | None = None) -> None:
        self._update = update

    def show(self, figures: Figures, schedule: Schedule) -> None:
        if self._update is not None:
            self._update(figures, schedule)


@contextmanager
def progress_bar(*, is_wanted: bool) -> Iterator[Bar]:
    """On standard error, so that standard output ends with its line of JSON."""
    if not is_wanted or not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f}/{task.fields[known]} rows"),
        TextColumn("{task.fields[flight]} in flight"),
        TextColumn("[red]{task.fields[bad]}[/red] failed"),
        TextColumn("{task.fields[rate]} tok/s"),
        TextColumn("TTFT {task.fields[ttft]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as shown:
        task = shown.add_task("replay", total=None, known="?", flight=0, bad=0, rate="-", ttft="-")

        def update(figures: Figures, schedule: Schedule) -> None:
            done = figures.outcomes.total()
            total = schedule.rows_read if schedule.is_at_end else None
            ttft = figures.values["ttft_ms"]
            shown.update(
                task,
                completed=done,
                total=total,
                known=f"{schedule.rows_read:,}{'' if schedule.is_at_end else '+'}",
                flight=schedule.sent,
                bad=figures.outcomes["failed"],
                rate=f"{figures.output_tokens / figures.wall_s:,.0f}" if figures.wall_s else "-",
                ttft=f"{ttft.total / ttft.count:,.0f} ms" if ttft.count else "-",
            )

        yield Bar(update)
