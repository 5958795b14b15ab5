"""What generating yields: pieces of choices, usage, and the sink that takes them.

SSE, JSON and ZeroMQ are three sinks; none of them knows where pieces come from, and nothing here knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.spec import Prompt

NO_TOKEN = -1
LOGPROB_FLOOR = -9999.0  # JSON has no -inf


class TokenLogprob(NamedTuple):
    """Of one token: its own logprob, then alternatives as the engine ranked them. None: a prompt's first token."""

    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(slots=True)
class PromptPart:
    """What a choice's first piece says of its prompt. `logprobs` is empty unless asked for, else one per token."""

    prompt: Prompt
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """One token of one choice, or its end without a token (`token` NO_TOKEN).

    `text` is empty while bytes or a possible stop are held back. `offset` is where the token's text starts in the
    choice's text. `finish_reason` is set in the choice's last piece only.
    """

    index: int
    text: str
    token: int
    depth: int
    offset: int
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    part: PromptPart | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """`loops` is the sum over the generated tokens; `cached_tokens` of the prompts' were not computed."""

    prompt_tokens: int
    completion_tokens: int
    loops: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "loops": self.loops,
        }


class Sink(Protocol):
    """Gets pieces of all choices, those of one choice in order; then exactly one of on_done and on_failed."""

    def on_accepted(self) -> None:
        """The first sequence has a slot."""

    def on_piece(self, piece: Piece) -> None:
        """Cheap; writing waits for flush."""

    def on_done(self, usage: Usage) -> None: ...

    def on_failed(self, error: ApiError) -> None: ...

    def flush(self) -> None:
        """The pieces of one batch of messages are complete: write them."""
