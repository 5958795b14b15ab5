"""A LocalFabric whose links a test can block and lift.

A blocked address answers LinkFull to every sender, as a peer does that reads too slowly.
"""

from __future__ import annotations

from epicycle.transport.errors import LinkFull
from epicycle.transport.link import LinkStats, Receiver, Sender
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.base import Wire

ROOMY = 1 << 20


class FakeSender:
    """Asks the fabric before each send."""

    def __init__(self, sender: Sender, fabric: FakeFabric) -> None:
        self.address = sender.address
        self._sender = sender
        self._fabric = fabric

    @property
    def stats(self) -> LinkStats:
        return self._sender.stats

    def send(self, message: Wire) -> None:
        if self.address in self._fabric.blocked:
            self.stats.rejected += 1
            raise LinkFull(f"{self.address} is blocked by the test")
        self._sender.send(message)

    def close(self) -> None:
        self._sender.close()


class FakeFabric:
    """`blocked` holds the addresses that take nothing for now."""

    def __init__(self) -> None:
        self._links = LocalFabric(limit=ROOMY)
        self.blocked: set[str] = set()

    def bind(self, owner: str, epoch: int, link: str, union: object) -> Receiver[object]:
        return self._links.bind(owner, epoch, link, union)

    def connect(self, address: str) -> Sender:
        return FakeSender(self._links.connect(address), self)

    def close(self) -> None:
        self._links.close()
