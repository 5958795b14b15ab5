"""What a client sees of one request while it runs, and the record that is kept of it.

Owns the fields of the JSONL rows. Times are milliseconds since the run began, by one clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Clock = Callable[[], float]  # milliseconds since the run began
Outcome = Literal["ok", "failed", "skipped", "dropped"]


@dataclass(eq=False)
class Observed:
    """Filled by a target. `error` is empty for an answer that ended as it should."""

    clock: Clock
    first_byte_ms: float | None = None
    token_ms: array[float] = field(default_factory=lambda: array("d"))
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    status: int = 0
    code: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def byte(self) -> None:
        if self.first_byte_ms is None:
            self.first_byte_ms = self.clock()

    def token(self, text: str, ids: list[int], depths: list[int], *, thought: str = "") -> None:
        """One token event. Without ids it counts as one token if it has text; what was `thought` is no reply."""
        now_ms = self.clock()
        self.token_ms.extend([now_ms] * (len(ids) or bool(text or thought)))
        self.texts.append(text)
        self.ids += ids
        self.depths += depths

    def fail(self, code: str, text: str, status: int = 0) -> None:
        """The first failure stays."""
        if not self.code:
            self.code, self.error = code, text[:500]
            self.status = status or self.status


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of the record. None: it never happened. `held_ms`: due, but its conversation had to wait for its turn.

    `lag_ms` is how much later than it could have been the client sent it. `tokens_in` and `cached_tokens` are the
    server's counts, `prompt_tokens` what the client sent where it knows. `tools` names what was waited for before.
    """

    id: str
    session: str = ""
    turn: int = 0
    line: int = 0
    outcome: Outcome = "ok"
    planned_ms: float | None = None
    held_ms: float = 0.0
    sent_ms: float | None = None
    first_byte_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    lag_ms: float | None = None
    prompt_tokens: int | None = None
    asked_tokens: int | None = None
    tokens_in: int | None = None
    tokens_out: int = 0
    cached_tokens: int | None = None
    exit_depths: list[int] = []
    tools: list[str] = []
    finish_reason: str = ""
    status: int = 0
    code: str = ""
    error: str = ""


def fill(record: RequestRecord, seen: Observed) -> None:
    """What a target saw, into its record."""
    usage = seen.usage
    details = usage.get("prompt_tokens_details") or {}
    record.first_byte_ms = seen.first_byte_ms
    record.first_token_ms = seen.token_ms[0] if seen.token_ms else None
    record.last_token_ms = seen.token_ms[-1] if seen.token_ms else None
    record.tokens_in = usage.get("prompt_tokens")
    record.cached_tokens = details.get("cached_tokens")
    record.tokens_out = len(seen.ids) or usage.get("completion_tokens") or len(seen.token_ms)
    record.exit_depths = seen.depths
    record.finish_reason = seen.finish_reason
    record.status, record.code, record.error = seen.status, seen.code, seen.error
    record.outcome = "failed" if seen.code else "ok"
