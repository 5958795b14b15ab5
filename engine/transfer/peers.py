"""The other executors that this one exchanges KV with: who is up, who has been met, who is known to be gone.

Owns one entry for each peer that is up, and what it takes to reach it. What one executor says may come before another
has announced it, so a `Meet` is kept until then. It must not know transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epicycle.engine.transfer.blocks import Blocks
from epicycle.engine.transfer.connector import Connector, TransferError
from epicycle.engine.transfer.events import TransferCounts
from epicycle.engine.transfer.probe import measure
from epicycle.transport.link import Sender
from epicycle.transport.outbox import Outbox
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.transfer import Meet

MOST_UNSENT = 1 << 16  # messages to one peer that its link has not taken


@dataclass(slots=True)
class Peer:
    """Another executor that is up; `blocks` once it has been met, `error` where that failed."""

    name: str
    epoch: int
    outbox: Outbox
    blocks: Blocks | None = None
    error: TransferError | None = None

    def send(self, message: Wire) -> None:
        self.outbox.push(message)


class Peers:
    """Seen by the executor `name` of this epoch; the speed of every link it measures goes to `counts`."""

    def __init__(self, connector: Connector, name: str, epoch: int, counts: TransferCounts) -> None:
        self._connector = connector
        self._name = name
        self._epoch = epoch
        self._counts = counts
        self._peers: dict[str, Peer] = {}
        self._down: dict[str, int] = {}  # the last epoch of a name that is known to be gone
        self._met: dict[tuple[str, int], Meet] = {}  # of peers that nobody has announced yet

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def find(self, name: str, epoch: int | None = None) -> Peer | None:
        """The peer, while that incarnation is up; without `epoch` whichever is."""
        peer = self._peers.get(name)
        return peer if peer is not None and epoch in (None, peer.epoch) else None

    def is_gone(self, name: str, epoch: int) -> bool:
        peer = self._peers.get(name)
        return self._down.get(name, 0) >= epoch or (peer is not None and peer.epoch > epoch)

    def up(self, name: str, epoch: int, sender: Sender) -> None:
        """Somebody who isn't there yet, or was and is `down`."""
        peer = self._peers[name] = Peer(name, epoch, Outbox(f"transfer to {name}", MOST_UNSENT))
        peer.outbox.connect(sender)
        peer.send(self._connector.meet(self._name, self._epoch))
        meet = self._met.pop((name, epoch), None)
        if meet is not None:
            self.meet(meet)

    def down(self, name: str, epoch: int) -> None:
        self._down[name] = max(epoch, self._down.get(name, 0))
        self._met = {key: meet for key, meet in self._met.items() if key[0] != name or key[1] > epoch}
        peer = self._peers.get(name)
        if peer is not None and peer.epoch <= epoch:
            peer.outbox.disconnect()
            self._connector.disconnect(name)
            del self._peers[name]

    def meet(self, meet: Meet) -> None:
        """Connect to a peer that has told how, once it is up, and measure the link."""
        peer = self._peers.get(meet.name)
        if peer is None or peer.epoch < meet.epoch:
            self._met[meet.name, meet.epoch] = meet
        elif peer.epoch == meet.epoch:
            try:
                blocks = self._connector.connect(meet)
                self._counts.link_bytes_per_s[peer.name] = measure(self._connector, peer.name, blocks)
                peer.blocks = blocks
            except TransferError as error:
                peer.error = error
