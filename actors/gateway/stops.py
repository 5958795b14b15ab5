"""Stop strings: found in the text whatever the token boundaries, never shown in part.

A match is judged letter by letter, so that it can't depend on how the text is cut into tokens: the stop that is
complete first wins, the longest of several that end together. Held back is only the longest suffix that could still
become a stop. Owns the suffix of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSet:
    """The stops of a request with their failure tables, shared by its choices."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.failures = [_failure_table(stop) for stop in self.stops]


class StopScanner:
    """One sequence's search. After a match it is spent."""

    def __init__(self, stop_set: StopSet) -> None:
        self._stops = stop_set.stops
        self._failures = stop_set.failures
        self._matched = [0] * len(self._stops)  # letters of each stop that the text's end spells
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop that was found or None)."""
        buffer = self._held + text
        for position, letter in enumerate(text, start=len(self._held) + 1):
            found = self._step(letter)
            if found is not None:
                return buffer[: position - len(found)], found
        self._held = buffer[len(buffer) - max(self._matched, default=0) :]
        return buffer[: len(buffer) - len(self._held)], None

    def flush(self) -> str:
        """What was held back and is no stop after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> str | None:
        found: str | None = None
        for number, stop in enumerate(self._stops):
            length, failure = self._matched[number], self._failures[number]
            while length and stop[length] != letter:
                length = failure[length - 1]
            length += stop[length] == letter
            self._matched[number] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = table[length - 1]
        length += stop[length] == stop[position]
        table[position] = length
    return table
