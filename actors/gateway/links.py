"""The gateway's links to control: what it sends, and how a slow or absent peer is met.

A Submit that the link refuses is an `overloaded` for its client; a Cancel waits and is retried, never dropped. Owns the
two senders. Must not know requests.
"""

from __future__ import annotations

import asyncio

from epicycle.actors.gateway.errors import ApiError
from epicycle.transport.errors import LinkFull, WireError
from epicycle.transport.link import Fabric, Sender
from epicycle.transport.outbox import AsyncOutbox, Outbox
from epicycle.transport.wire.control import PeerUp
from epicycle.transport.wire.request import Cancel, FromSubmitLink

CANCELS_LIMIT = 1 << 20  # a guard: at most one Cancel per rid in flight
SETTLE_S = 1.0  # a link just connected has no peer for a moment
SETTLE_RETRY_S = 0.005


class ControlLinks:
    """All methods on the gateway's loop."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._submits: Sender | None = None
        self._cancels = AsyncOutbox(Outbox("cancel", CANCELS_LIMIT))
        self._connected_s = 0.0
        self._lost_refusals = 0

    @property
    def is_up(self) -> bool:
        return self._submits is not None

    @property
    def refused_sends(self) -> int:
        """Times a link said EAGAIN, over all incarnations of control."""
        return self._lost_refusals + (self._submits.stats.rejected if self._submits is not None else 0)

    @property
    def waiting_cancels(self) -> int:
        return len(self._cancels)

    def connect(self, peer: PeerUp) -> None:
        """`peer` is a new incarnation of control; the old one must have been disconnected."""
        address = {endpoint.link: endpoint.address for endpoint in peer.endpoints}
        self._submits = self._fabric.connect(address["submit"])
        self._cancels.connect(self._fabric.connect(address["cancel"]))
        self._connected_s = self._loop.time()

    def disconnect(self) -> None:
        """Control is gone, and everything it was told with it. Idempotent."""
        if self._submits is not None:
            self._lost_refusals += self._submits.stats.rejected
            self._submits.close()
            self._submits = None
        self._cancels.disconnect()

    async def submit(self, message: FromSubmitLink) -> None:
        """Raises ApiError: overloaded, not_ready, request_too_large. Waits only while the link is settling."""
        while True:
            if self._submits is None:
                raise ApiError("not_ready", "the control process is not up: it is starting or restarting")
            try:
                self._submits.send(message)
            except LinkFull as error:
                if self._loop.time() - self._connected_s > SETTLE_S:
                    raise ApiError("overloaded", f"the server is too busy to take requests: {error}") from None
                await asyncio.sleep(SETTLE_RETRY_S)
            except WireError as error:
                raise ApiError("request_too_large", str(error)) from None
            else:
                return

    def cancel(self, rid: int, cause: str) -> None:
        if self._submits is not None:
            self._cancels.push(Cancel(rid, cause))
