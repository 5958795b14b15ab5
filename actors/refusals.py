"""Why a request is refused: every Rejected that control can send, with value, limit and knob in its text.

Pure functions. Codes are those of the HTTP error body.
"""

from __future__ import annotations

from collections.abc import Sequence

from epicycle.kvstore.reserve import lifetime_pages
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import Rejected

# What a Withdraw's reason is called when the request never reached the executor.
CODES = {"cancelled": "cancelled", "deadline": "timeout", "shutdown": "draining"}


def overloaded(rid: int, waiting: int, max_waiting: int, retry_after_s: int) -> Rejected:
    text = (
        f"{waiting} requests wait, the limit is {max_waiting} (scheduler.max_waiting); try again in {retry_after_s} s"
    )
    return Rejected(rid, "overloaded", text, retry_after_s=retry_after_s)


def draining(rid: int) -> Rejected:
    return Rejected(rid, "draining", "the server is shutting down and takes no new requests", retry_after_s=5)


def not_ready(rid: int) -> Rejected:
    return Rejected(rid, "not_ready", "no executor is ready: it is loading or restarting", retry_after_s=1)


def engine_lost(rid: int, reason: str) -> Rejected:
    return Rejected(rid, "engine_lost", f"the executor is gone: {reason}", retry_after_s=1)


def cancelled(rid: int, cause: str) -> Rejected:
    return Rejected(rid, "cancelled", f"cancelled ({cause}) before it ran")


def timeout(rid: int, waited_ms: float, limit_ms: float, knob: str) -> Rejected:
    text = f"waited {waited_ms:.0f} ms in the queue, the limit is {limit_ms:.0f} ms ({knob})"
    return Rejected(rid, "timeout", text)


def withdrawn(rid: int, reason: str, message: str) -> Rejected:
    """For one that had a slot but whose Join was never sent."""
    return Rejected(rid, CODES[reason], message or f"{reason} before it ran")


def fits_nowhere(rid: int, prompt_tokens: int, max_tokens: int, pools: Sequence[Capabilities]) -> Rejected | None:
    """The refusal of a request that none of these executors could run even alone, told of the roomiest; or None."""
    refused = [never_fits(rid, prompt_tokens, max_tokens, facts) for facts in by_room(pools)]
    return None if None in refused else refused[0]


def by_room(pools: Sequence[Capabilities]) -> list[Capabilities]:
    """Executors by what one request may take there, most first."""
    return sorted(pools, key=lambda facts: (facts.context_tokens, facts.total_pages), reverse=True)


def never_fits(rid: int, prompt_tokens: int, max_tokens: int, facts: Capabilities) -> Rejected | None:
    """The refusal of a request that could not run even alone, or None."""
    asked = f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} = {prompt_tokens + max_tokens} tokens"
    if prompt_tokens < 1:
        return Rejected(rid, "invalid_request_error", "the prompt has no tokens; it needs at least 1", "prompt")
    if prompt_tokens + max_tokens > facts.context_tokens:
        text = f"{asked}; the context is {facts.context_tokens} tokens (engine.context_tokens)"
        return Rejected(rid, "context_length_exceeded", text, "max_tokens")
    pages = lifetime_pages(prompt_tokens, max(1, max_tokens), facts.page_tokens)
    if pages > facts.total_pages:
        text = (
            f"{asked} need {pages} pages of {facts.page_tokens} tokens; the KV pool has {facts.total_pages} "
            "(engine.kv_memory_bytes)"
        )
        return Rejected(rid, "context_length_exceeded", text, "max_tokens")
    return None
