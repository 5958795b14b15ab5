"""The supervisor's view, asked at most once at a time and remembered for a moment.

Probes and scrapes come from many sides at once; one question serves them all. Owns the last reply.
"""

from __future__ import annotations

import asyncio

from epicycle.actors.ports import Host
from epicycle.transport.wire.control import HealthReply

DEADLINE_S = 2.0


class HealthCache:
    """All methods on the gateway's loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._asking: asyncio.Task[HealthReply] | None = None
        self._reply: HealthReply | None = None
        self._replied_s = 0.0

    async def ask(self, max_age_s: float = 0.0) -> HealthReply:
        """A reply at most `max_age_s` old. Raises TimeoutError when the supervisor doesn't answer."""
        loop = asyncio.get_running_loop()
        if self._reply is not None and loop.time() - self._replied_s <= max_age_s:
            return self._reply
        if self._asking is None:
            self._asking = loop.create_task(self._ask())
            self._asking.add_done_callback(self._settle)
        return await asyncio.shield(self._asking)

    async def _ask(self) -> HealthReply:
        async with asyncio.timeout(DEADLINE_S):
            reply = await self._host.health()
        self._reply, self._replied_s = reply, asyncio.get_running_loop().time()
        return reply

    def _settle(self, task: asyncio.Task[HealthReply]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # whoever asked may have left
