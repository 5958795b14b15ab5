"""What captured graphs hold is told as measured, and other processes' memory never as theirs."""

from __future__ import annotations

import pytest

from epicycle.engine.graphs import DRIVER_BYTES, GRAPH_BYTES, CaptureReport, bytes_held

MIB = 1 << 20


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (188 * MIB, (188 * MIB, 0)),
        (90 * MIB, (100 * MIB, 0)),  # the driver gave something back
        (100 * MIB + 61 * GRAPH_BYTES + DRIVER_BYTES, (408 * MIB, 0)),
        (100 * MIB + 61 * GRAPH_BYTES + DRIVER_BYTES + 1, (100 * MIB, 61 * GRAPH_BYTES + DRIVER_BYTES + 1)),
        (23_666 * MIB, (100 * MIB, 23_566 * MIB)),
        (-27_258 * MIB, (100 * MIB, -27_358 * MIB)),
    ],
)
def test_the_cards_free_memory_counts_only_where_graphs_can_have_taken_it(
    taken: int, expected: tuple[int, int]
) -> None:
    assert bytes_held(61, 100 * MIB, taken) == expected


def test_the_line_tells_what_graphs_do_not_explain() -> None:
    assert CaptureReport(61, 0, 2.6, 188 * MIB).line() == "graphs: 61 captured in 2.6 s, 188 MiB"
    told = CaptureReport(61, 3, 2.6, 100 * MIB, -27_358 * MIB).line()
    assert told.startswith("graphs: 61 captured in 2.6 s, 100 MiB, 3 beyond the cap left out; the card has ")
    assert "-27,358 MiB less besides" in told and "other processes" in told
