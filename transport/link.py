"""What a link is, whatever carries it: one direction, one receiver that binds, senders that connect.

Two implementations meet these protocols and share one conformance suite: `local_link.py` (in memory, through the
codec) and `zmq_link.py` (PUSH -> PULL over ipc). "Accepted" never means delivered: senders keep an in-flight table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from epicycle.transport.wire.base import Wire

M = TypeVar("M")

DRAIN_LIMIT = 1024


@dataclass
class LinkStats:
    """Counters of one end, for beats and metrics."""

    messages: int = 0
    rejected: int = 0  # receiver: malformed frames dropped; sender: LinkFull raised


def path_name(owner: str, epoch: int, link: str) -> str:
    """The last part of a receiver's address. It holds the epoch, so no two incarnations share one."""
    return f"{owner}.e{epoch}.{link}"


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
        """Readable when drain() may return something. Edge-triggered: after waking, drain until it returns less than
        its limit (only then has it seen the end), or it may never ring again."""

    def drain(self, limit: int = DRAIN_LIMIT) -> list[M]:
        """What has arrived, oldest first, at most `limit`; never waits. Malformed frames are dropped and counted."""

    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until a message may be there or the time is over. For the executor only; to wait
        for several things at once drain each to its end and use doorbell.wait_readable."""

    def close(self) -> None:
        """Stop receiving; what was not drained is lost. Idempotent."""


class Fabric(Protocol):
    """Makes links. One fabric per process (or one for the whole server with --single-process)."""

    def bind(self, owner: str, epoch: int, link: str, union: object) -> Receiver[object]:
        """A receiver of `union` at a path made of owner, epoch and link. Raises AddressError if bound before."""

    def connect(self, address: str) -> Sender:
        """A sender to a receiver's address, which need not be bound yet: until it is, send() raises LinkFull.
        Raises AddressError for an address that this fabric can't reach."""

    def close(self) -> None:
        """Close every link made here."""
