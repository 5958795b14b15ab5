"""A request in its slot, as the mock pump knows it. Owns its fields; it must not know what a tick does with them."""

from __future__ import annotations

from dataclasses import dataclass

from epicycle.transport.wire.plan import Join


@dataclass
class MockRow:
    """A resident request. `written_tokens` counts KV positions; `outputs` the tokens sampled."""

    join: Join
    key: int
    prompt_tokens: int
    cached_tokens: int
    stop_ids: frozenset[int]
    limit_tokens: int
    pages: int
    prefill_ticks: int
    written_tokens: int
    joined_s: float
    outputs: int = 0
    is_final: bool = False
    first_token_s: float = 0.0
