"""What moves bytes between two executors' memories: the seam between the transfer port and NIXL or its twins.

Owns the protocol and its error. Called from the port's thread alone.
"""

from __future__ import annotations

from typing import Protocol

from epicycle.engine.errors import EngineError
from epicycle.engine.transfer.blocks import Blocks, Numbers
from epicycle.transport.wire.transfer import Meet


class TransferError(EngineError):
    """A write, or the way to a peer, that has failed. `code`: transfer_error, or peer_down where the peer is gone."""


class Write(Protocol):
    """Bytes on their way."""

    def is_done(self) -> bool:
        """They are in place and their tag is on its way; never waits. Raises TransferError, then and ever after."""
        ...

    def release(self) -> None:
        """Forget it, done or given up. Idempotent."""
        ...


class Connector(Protocol):
    """One executor's end. `blocks` are its own memory's."""

    blocks: Blocks

    def enter(self) -> None:
        """First call from the port's thread."""
        ...

    def meet(self, name: str, epoch: int) -> Meet:
        """What a peer must know to write here."""
        ...

    def connect(self, meet: Meet) -> Blocks:
        """Be ready to write to a peer; its blocks. Raises TransferError."""
        ...

    def disconnect(self, name: str) -> None:
        """Forget a peer, alive or dead, once its writes are released. Unknown: ignored."""
        ...

    def write(self, peer: str, source: Numbers, target: Numbers, tag: bytes) -> Write:
        """Copy blocks `source` here to blocks `target` there, then hand `tag` to the peer. Both are in an order in
        which neighbours lie side by side. Raises TransferError."""
        ...

    def arrived(self) -> list[bytes]:
        """Tags of peers' writes whose bytes have come, oldest first."""
        ...

    def close(self) -> None:
        """Let go of peers and memory. Idempotent."""
        ...


def blocks_of(own: Blocks, meet: Meet) -> Blocks:
    """A peer's blocks, from its Meet. Raises TransferError for regions that make none."""
    regions = {region.name: (region.address, region.bytes) for region in meet.regions}
    try:
        return Blocks(own.shape, regions["k"], regions["v"], regions["heads"])
    except (KeyError, AssertionError) as error:
        raise TransferError("transfer_error", f"{meet.name} e{meet.epoch} has unusable regions: {error}") from error
