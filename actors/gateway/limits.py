"""Limits in tokens: what a request asks for, what the context and the KV pool hold, what a default becomes."""

from __future__ import annotations

from epicycle.actors import refusals
from epicycle.actors.gateway.bodies import ChatBody, CompletionBody
from epicycle.actors.gateway.defaults import COMPLETION_MAX_TOKENS
from epicycle.actors.gateway.errors import ApiError, invalid
from epicycle.actors.gateway.served import Served
from epicycle.actors.gateway.spec import Prompt


def asked_max_tokens(body: CompletionBody | ChatBody, echo: bool) -> tuple[str, int | None]:
    """(the field the client used, its value); 0 is legal with echo only: the prompt is scored and nothing made."""
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        field = "max_completion_tokens"
        if asked is not None and asked != body.max_completion_tokens:
            text = f"max_completion_tokens is {body.max_completion_tokens} and max_tokens {asked}; send one of them"
            raise invalid(field, text)
        asked = body.max_completion_tokens
    if asked is not None and asked < (0 if echo else 1):
        raise invalid(field, f"{field} is {asked}, must be at least 1 (0 only with echo on /v1/completions)")
    return field, asked


def max_tokens_of(
    asked: int | None,
    field: str,
    prompt: Prompt,
    served: Served,
    body: CompletionBody | ChatBody,
    depths: list[int] | None,
) -> int:
    """The limit of one prompt: the asked one must fit, a default is clipped to what is left."""
    facts, length = served.facts, len(prompt.ids)
    source = "messages" if isinstance(body, ChatBody) else "prompt"
    if asked is None:
        left = facts.context_tokens - length
        if left < 1:
            text = f"the prompt has {length} tokens, the context is {facts.context_tokens} tokens"
            raise ApiError("context_length_exceeded", f"{text} (engine.context_tokens)", source)
        default = left if isinstance(body, ChatBody) else min(COMPLETION_MAX_TOKENS, left)
        return default if depths is None else min(default, len(depths))
    refusal = refusals.never_fits(0, length, asked, facts)
    if refusal is not None:
        raise ApiError(refusal.code, refusal.message, source if length >= facts.context_tokens else field)
    return asked
