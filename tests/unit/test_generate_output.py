"""`epicycle generate`: bars, colours and the summary, as functions of depths."""

from __future__ import annotations

import pytest

from epicycle.tools.generate import BARS, COLOURS, bar, coloured, painted, parser, step, summary
from epicycle.transport.results import StreamEvent


@pytest.mark.parametrize(
    ("loops", "expected"),
    [(4, "▂▄▆█"), (8, "▁▂▃▄▅▆▇█"), (1, "█"), (2, "▄█"), (32, "▁▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇████")],
)
def test_bars_grow_with_depth_and_the_deepest_is_full(loops: int, expected: str) -> None:
    assert expected == "".join(bar(depth, loops) for depth in range(1, loops + 1))


def test_a_depth_beyond_the_known_loops_stays_on_the_last_step() -> None:
    assert 7 == step(9, 4, 8)
    assert BARS[-1] == bar(9, 4)


def test_colour_goes_with_depth_and_is_left_off_nothing() -> None:
    assert f"\x1b[38;5;{COLOURS[1]}mword\x1b[0m" == coloured("word", 1, 4)
    assert f"\x1b[38;5;{COLOURS[-1]}mword\x1b[0m" == coloured("word", 4, 4)
    assert "" == coloured("", 4, 4)


def test_an_event_is_painted_by_its_deepest_token_with_a_bar_for_each() -> None:
    event = StreamEvent(0, "ab", [7, 8], [1, 3])

    assert coloured("ab", 3, 4) + coloured("▂", 1, 4) + coloured("▆", 3, 4) == painted(event, 4)


def test_text_without_tokens_has_no_bar() -> None:
    assert "tail" == painted(StreamEvent(0, "tail", [], []), 4)


def test_held_back_text_still_has_its_bar() -> None:
    assert coloured("▄", 2, 4) == painted(StreamEvent(0, "", [7], [2]), 4)


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ([], "no tokens"),
        ([4, 4], "2 tokens, 4.00 of 4 loops a token, 0 % of the loops saved"),
        ([4, 1, 1, 2], "4 tokens, 2.00 of 4 loops a token, 50 % of the loops saved"),
    ],
)
def test_the_summary_counts_against_full_depth(depths: list[int], expected: str) -> None:
    assert expected == summary(depths)


def test_only_what_is_given_is_asked() -> None:
    arguments = parser().parse_args(["hello", "--max-loops", "2"])

    assert (64, 2, None, None, False) == (
        arguments.max_tokens,
        arguments.max_loops,
        arguments.min_loops,
        arguments.exit_threshold,
        arguments.chat,
    )
