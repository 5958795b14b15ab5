"""What the embeddable client hands to its users: events, and the whole answer they add up to.

Plain values, no sockets. Columns of the wire become lists here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epicycle.transport.wire.client import Event
from epicycle.transport.wire.columns import I32, U16, unpack_list

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class StreamEvent:
    """New output of one choice. `exit_depths` is as long as `token_ids`: loops run for each token.

    `finish_reason` is empty until the choice's last event. `logprobs` has the shape of the HTTP body's.
    """

    index: int
    text: str
    token_ids: list[int]
    exit_depths: list[int]
    finish_reason: str = ""
    stop_reason: str = ""
    logprobs: Any = None
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass
class Choice:
    """One finished sequence; `logprobs` lists what its events carried, in order."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)

    def add(self, event: StreamEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.exit_depths += event.exit_depths
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_reason = event.stop_reason or self.stop_reason
        self.prompt_token_ids = event.prompt_token_ids or self.prompt_token_ids
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)


@dataclass
class Result:
    """A whole answer. The fields of the first choice are readable on the result itself.

    `usage` is the HTTP body's usage object; empty for a request that was cancelled.
    """

    choices: list[Choice]
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def exit_depths(self) -> list[int]:
        return self.choices[0].exit_depths

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


class Collector:
    """Adds events up. One per request."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}

    def add(self, event: StreamEvent) -> None:
        self._choices.setdefault(event.index, Choice(event.index)).add(event)

    def result(self, usage: dict[str, Any], is_cancelled: bool) -> Result:
        """The answer so far, choices by index; one empty choice if nothing came."""
        choices = [self._choices[index] for index in sorted(self._choices)] or [Choice(0)]
        for choice in choices:
            if is_cancelled and not choice.finish_reason:
                choice.finish_reason = "cancelled"
        return Result(choices, usage)


def stream_event(message: Event) -> StreamEvent:
    """The public form of a wire event. Raises ValueError or msgspec.DecodeError on columns that aren't ours."""
    return StreamEvent(
        index=message.index,
        text=message.text,
        token_ids=unpack_list(I32, message.token_ids),
        exit_depths=unpack_list(U16, message.exit_depths),
        finish_reason=message.finish_reason,
        stop_reason=message.stop_reason,
        logprobs=msgspec.json.decode(message.logprobs) if message.logprobs else None,
        prompt_token_ids=unpack_list(I32, message.prompt_ids),
    )
