"""What a request gave, as bits, and where two of them first differ. Pure functions; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from epicycle.tools.offline import Reply
from epicycle.transport.wire.columns import F32, pack


@dataclass(frozen=True)
class Outcome:
    """`logprobs` are the float32 bits of each token's logprob."""

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    logprobs: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Difference:
    """The first place where a trial left its solo run. `what`: token, depth, logprob or reason."""

    what: str
    index: int
    expected: object
    actual: object

    def __str__(self) -> str:
        return f"{self.what} at output {self.index}: {self.actual} instead of {self.expected}"


def outcome_of(reply: Reply) -> Outcome:
    assert reply.end is not None
    bits = pack(F32, reply.logprobs)
    logprobs = tuple(bits[at : at + 4][::-1].hex() for at in range(0, len(bits), 4))
    return Outcome(tuple(reply.tokens), tuple(reply.exit_depths), logprobs, reply.end.reason)


def first_difference(expected: Outcome, actual: Outcome) -> Difference | None:
    """None where every bit is equal. Of several differences at one output: token before depth before logprob."""
    pairs = zip_longest(
        zip(expected.tokens, expected.depths, expected.logprobs, strict=True),
        zip(actual.tokens, actual.depths, actual.logprobs, strict=True),
        fillvalue=(None, None, None),
    )
    for index, (want, got) in enumerate(pairs):
        for what, one, other in zip(("token", "depth", "logprob"), want, got, strict=True):
            if one != other:
                return Difference(what, index, one, other)
    if expected.reason != actual.reason:
        return Difference("reason", len(expected.tokens), expected.reason, actual.reason)
    return None
