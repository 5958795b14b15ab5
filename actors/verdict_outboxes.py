"""Verdicts on their way to the gateways: one outbox each, in order, bounded by what is in flight.

Owns the senders to gateways. It must not know what a verdict says.
"""

from __future__ import annotations

from epicycle.transport.link import Sender
from epicycle.transport.outbox import Outbox
from epicycle.transport.wire.request import Verdict

LIMIT_VERDICTS = 1 << 20  # a guard: a gateway has at most two verdicts per request in its own bounded table


class VerdictOutboxes:
    """A gateway not heard of yet is waited for; one that is gone gets nothing until it is back."""

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox] = {}
        self._gone: set[int] = set()

    def __len__(self) -> int:
        """Verdicts that no link has taken."""
        return sum(len(outbox) for outbox in self._outboxes.values())

    @property
    def refused_sends(self) -> int:
        senders = (outbox.sender for outbox in self._outboxes.values())
        return sum(sender.stats.rejected for sender in senders if sender is not None)

    def connect(self, number: int, sender: Sender) -> None:
        self._gone.discard(number)
        self._outbox(number).connect(sender)

    def drop(self, number: int) -> None:
        self._gone.add(number)
        outbox = self._outboxes.pop(number, None)
        if outbox is not None:
            outbox.disconnect()

    def push(self, number: int, verdict: Verdict) -> None:
        if number not in self._gone:
            self._outbox(number).push(verdict)

    def tell_all(self, verdict: Verdict) -> None:
        """To every gateway that is connected."""
        for outbox in self._outboxes.values():
            if outbox.sender is not None:
                outbox.push(verdict)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.disconnect()

    def _outbox(self, number: int) -> Outbox:
        return self._outboxes.setdefault(number, Outbox(f"verdicts.gw{number}", LIMIT_VERDICTS))
