"""The bounded inbox of an actor that shares its process with its callers: posts in, batches out, in order.

Owns the messages not handled yet. It never waits and has no loop, so a test can turn the actors by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from epicycle.transport.errors import LinkFull
from epicycle.transport.wire.control import MailboxStat

M = TypeVar("M")
LIMIT_MESSAGES = 16_384


class Inbox(Generic[M]):
    """`limit` is a guard, not a queue length: the actors of a process are turned after every batch they receive."""

    def __init__(self, name: str, limit: int = LIMIT_MESSAGES) -> None:
        self.name = name
        self.limit = limit
        self.rejected = 0
        self._messages: list[M] = []

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, message: M) -> None:
        """Add one message. Raises LinkFull at the limit."""
        if len(self._messages) >= self.limit:
            self.rejected += 1
            raise LinkFull(f"inbox {self.name} holds {len(self._messages)} messages, its limit")
        self._messages.append(message)

    def extend(self, messages: Iterable[M]) -> None:
        for message in messages:
            self.post(message)

    def take(self) -> list[M]:
        """Everything that waits, oldest first; the inbox is empty afterwards."""
        messages, self._messages = self._messages, []
        return messages

    def stat(self) -> MailboxStat:
        return MailboxStat(self.name, len(self._messages), self.rejected)
