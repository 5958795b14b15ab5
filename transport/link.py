"""What a link is, whatever carries it: one direction, one receiver that binds, senders that connect.

Two implementations meet these protocols and share one conformance suite: `local_link.py` (in memory, through the
codec) and `zmq_link.py` (PUSH -> PULL over ipc). "Accepted" never means delivered: senders keep an in-flight table.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from epicycle.transport.wire.base import Wire

M = TypeVar("M")

DRAIN_LIMIT = 1024


class LinkStats(Protocol):
    """Counters of one end, for beats and metrics."""

    messages: int
    rejected: int  # receiver: malformed frames dropped; sender: LinkFull raised


class Sender(Protocol):
    """The connecting end. Not thread-safe: one owner."""

    address: str

    @property
    def stats(self) -> LinkStats: ...

    def send(self, message: Wire) -> None:
        """Queue one message. Raises LinkFull when the peer is slow or absent, LinkClosed after close()."""

    def close(self) -> None:
        """Drop what is unsent (LINGER 0). Idempotent."""


class Receiver(Protocol[M]):
    """The binding end. `address` is what a peer connects to; it holds the owner's epoch and is never bound twice."""

    address: str
    link: str

    @property
    def stats(self) -> LinkStats: ...

    def fileno(self) -> int:
        """Readable when drain() may return something. Edge-triggered: after waking, drain until it returns []."""

    def drain(self, limit: int = DRAIN_LIMIT) -> list[M]:
        """What has arrived, oldest first, at most `limit`; never waits. Malformed frames are dropped and counted."""

    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until a message may be there or the time is over. For the executor only."""

    def close(self) -> None: ...


class Fabric(Protocol):
    """Makes links. One fabric per process (or one for the whole server with --single-process)."""

    def bind(self, owner: str, epoch: int, link: str, union: object) -> Receiver[object]:
        """A receiver of `union` at a path made of owner, epoch and link. Raises AddressError if bound before."""

    def connect(self, address: str) -> Sender: ...

    def close(self) -> None:
        """Close every link made here."""
