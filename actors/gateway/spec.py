"""A validated request: everything that generating and answering it needs, no field unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epicycle.actors.gateway.stops import StopSet
from epicycle.transport.wire.request import LoopBounds, Sampling


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what echo shows; for a prompt given as ids it is their decoding. `is_text`: the client sent just it."""

    ids: list[int]
    text: str
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """One request. Choice `p * n + c` is completion c of prompt p.

    `samplings` holds one Sampling per prompt, without the choice. `stop_ids` ends a sequence, `named_stop_ids` are
    those of the client, which stop_reason reports. `messages` and `tools` are a chat's own. `conversation` is what a
    recording calls the session: `session_id`, which pins cached pages too, or the header that load generators send.
    """

    is_chat: bool
    model_id: str
    prompts: list[Prompt]
    n: int
    samplings: list[Sampling]
    loops: list[LoopBounds]
    stops: StopSet
    stop_ids: frozenset[int]
    named_stop_ids: frozenset[int]
    wants_logprobs: bool
    echo: bool
    is_stream: bool
    includes_usage: bool
    returns_token_ids: bool
    skips_special_tokens: bool
    priority: int
    noise_seed: int
    cache_salt: str
    session_id: str
    conversation: str = ""
    messages: Sequence[msgspec.Struct] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
