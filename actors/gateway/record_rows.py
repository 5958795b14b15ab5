"""From a request that has ended to its native trace rows, one for each choice that made a token.

Pure. Prompts become keyed block hashes, and session names keyed hashes too, unless text is recorded. Must not know
threads or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from epicycle.actors.gateway.spec import Prompt, Spec
from epicycle.transport.trace_rows import TraceRow, block_hashes


@dataclass(slots=True)
class Ended:
    """What the gateway's loop collects of a request. Times are epoch milliseconds.

    `depths` and `reasons` have one entry per choice; a reason is empty where the choice was cut short, whose cause
    `cut` says then. `waited_for` is the session's request before, 0 for none, `idle_ms` the time since its end.
    """

    spec: Spec
    rids: list[int]
    sent_ms: float
    depths: list[list[int]]
    reasons: list[str]
    first_ms: float = 0.0
    ended_ms: float = 0.0
    cut: str = ""
    cached_tokens: list[int] = field(default_factory=list)
    waited_for: int = 0
    idle_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RowStyle:
    """`key` keeps hashes from being guessed; `defaults` are the loop controls that rows needn't repeat."""

    key: bytes
    block_tokens: int
    has_text: bool


def request_id(rid: int) -> str:
    return f"{rid:016x}"


def rows_of(ended: Ended, style: RowStyle) -> list[TraceRow]:
    spec = ended.spec
    return [
        _row(ended, style, choice, spec.prompts[choice // spec.n])
        for choice, depths in enumerate(ended.depths)
        if depths
    ]


def _row(ended: Ended, style: RowStyle, choice: int, prompt: Prompt) -> TraceRow:
    depths = ended.depths[choice]
    wait_for = [request_id(ended.waited_for)] if ended.waited_for else []
    return TraceRow(
        request_id=request_id(ended.rids[choice]),
        session_id=_session(ended.spec.conversation, style),
        timestamp=round(ended.sent_ms, 3),
        wait_for=wait_for,
        delay=round(ended.idle_ms, 3) if wait_for else None,
        input_length=len(prompt.ids),
        output_length=len(depths),
        exit_depths=depths,
        extra=_extra(ended.spec, choice) if style.has_text else {},
        meta=_meta(ended, choice),
        **_prompt(ended.spec, prompt, style),
    )


def _prompt(spec: Spec, prompt: Prompt, style: RowStyle) -> dict[str, Any]:
    if not style.has_text:
        hashes = block_hashes(prompt.ids, style.block_tokens, style.key)
        return {"hash_ids": hashes, "block_size": style.block_tokens}
    if spec.messages is not None:
        return {"messages": [_message(message) for message in spec.messages], "tools": spec.tools or None}
    return {"text_input": prompt.text} if prompt.is_text else {"token_ids": prompt.ids}


def _message(message: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return {name: value for name, value in fields.items() if value is not None}


def _session(name: str, style: RowStyle) -> str:
    if not name or style.has_text:
        return name
    return blake2b(name.encode(), digest_size=8, key=style.key).hexdigest()


def _extra(spec: Spec, choice: int) -> dict[str, Any]:
    """What the same text takes; a client's other fields can't be told from defaults any more."""
    sampling, loops = spec.samplings[choice // spec.n], spec.loops[choice // spec.n]
    extra: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    if sampling.top_k:
        extra["top_k"] = sampling.top_k
    return extra | {"min_loops": loops.min_loops, "max_loops": loops.max_loops}


def _meta(ended: Ended, choice: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish": ended.reasons[choice] or ended.cut}
    if ended.first_ms:
        meta["ttft_ms"] = round(ended.first_ms - ended.sent_ms, 3)
    meta["e2e_ms"] = round(ended.ended_ms - ended.sent_ms, 3)
    if ended.cached_tokens[choice]:
        meta["cached_tokens"] = ended.cached_tokens[choice]
    return meta
