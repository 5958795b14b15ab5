"""What an exchange tells of its transfers: events for the pump, counts for health.

Values only; they must not know how transfers work.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Landed:
    """D: the prompt's KV and head row are in place."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Ended:
    """No write touches the slot's pages any more; the transfer is forgotten."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It can't be completed; the transfer is kept until it is stopped."""

    transfer: int
    code: str
    message: str


Event = Landed | Ended | Failed


@dataclass(slots=True)
class TransferCounts:
    """Totals since the start, and what is on its way now. A tail is from the prompt's end to the Ack; early bytes were
    posted before that end."""

    sent: int = 0
    received: int = 0
    failed: int = 0
    sent_bytes: int = 0
    early_bytes: int = 0
    writes: int = 0
    blocks: int = 0
    segments: int = 0
    inflight_bytes: int = 0
    late_messages: int = 0
    tail_s: float = 0.0
    tails_s: list[float] = field(default_factory=list)  # the last MOST_TAILS
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)  # by peer, when it was met


MOST_TAILS = 1024
