"""Stop strings are found on text, cut exactly, never shown in part, and never depend on token boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicycle.actors.gateway.stops import StopScanner, StopSet


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner, shown = StopScanner(StopSet(stops)), ""
    for piece in pieces:
        text, found = scanner.push(piece)
        shown += text
        if found is not None:
            return shown, found
    return shown + scanner.flush(), None


def plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """What it means: the stop that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["end"], ["the end."], ("the ", "end")),
        (["end"], ["the e", "n", "d."], ("the ", "end")),
        (["end"], ["the e", "n", "t"], ("the ent", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["abcd", "bc"], ["a", "b", "c", "d"], ("a", "bc")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ("one\ntwo", "\n\n")),
        (["\U0001f600"], ["smile \U0001f600"], ("smile ", "\U0001f600")),
        (["1", "2", "3", "4", "5"], ["a", "b4c"], ("ab", "4")),
        (["x" * 10_000], ["x" * 9_999, "y"], ("x" * 9_999 + "y", None)),
        (["x" * 10_000], ["y", "x" * 5_000, "x" * 5_000, "z"], ("y", "x" * 10_000)),
        (["end"], ["e", "n"], ("en", None)),
    ],
)
def test_known_cases(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert expected == run(stops, pieces)


def test_only_a_possible_stop_is_held_back() -> None:
    scanner = StopScanner(StopSet(["stop"]))
    assert ("i", None) == scanner.push("is")
    assert ("s it a ", None) == scanner.push(" it a st")
    assert ("st", None) == scanner.push("s")
    assert ("se", None) == scanner.push("e")
    assert "" == scanner.flush()


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_cut_is_the_same_for_every_tokenization(stops: list[str], pieces: list[str]) -> None:
    assert plain(stops, "".join(pieces)) == run(stops, pieces)
