"""What counts as a difference, and where it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epicycle.tools.offline import Reply
from epicycle.tools.verify_compare import Difference, Outcome, first_difference, outcome_of
from epicycle.transport.wire.output import Fin

SOLO = Outcome((5, 6, 7), (4, 2, 3), ("bf000000", "be000000", "bd000000"), "length")


def test_equal_bits_are_no_difference() -> None:
    assert first_difference(SOLO, replace(SOLO)) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (replace(SOLO, tokens=(5, 9, 7)), Difference("token", 1, 6, 9)),
        (replace(SOLO, depths=(4, 2, 4)), Difference("depth", 2, 3, 4)),
        (replace(SOLO, logprobs=("bf000001", *SOLO.logprobs[1:])), Difference("logprob", 0, "bf000000", "bf000001")),
        (replace(SOLO, reason="stop"), Difference("reason", 3, "length", "stop")),
        (Outcome((5, 6), (4, 2), SOLO.logprobs[:2], "length"), Difference("token", 2, 7, None)),
    ],
)
def test_the_first_difference_is_named(changed: Outcome, expected: Difference) -> None:
    assert expected == first_difference(SOLO, changed)


def test_the_earliest_output_comes_first_whatever_differs() -> None:
    changed = replace(SOLO, tokens=(5, 6, 8), logprobs=(SOLO.logprobs[0], "00000000", SOLO.logprobs[2]))
    assert Difference("logprob", 1, "be000000", "00000000") == first_difference(SOLO, changed)


def test_a_difference_reads_as_a_sentence() -> None:
    assert "depth at output 2: 4 instead of 3" == str(Difference("depth", 2, 3, 4))


def test_logprobs_are_kept_as_float32_bits() -> None:
    end = Fin(epoch=1, rid=1, reason="length", tokens=2)
    reply = Reply(submitted_s=0.0, prompt_tokens=1, tokens=[5, 6], exit_depths=[4, 2], logprobs=[-0.5, -0.0], end=end)
    assert Outcome((5, 6), (4, 2), ("bf000000", "80000000"), "length") == outcome_of(reply)
