"""FakeHost: a process for one actor, in a test's hands.

It records what the actor said to the supervisor, and lets a test play the supervisor: `peer_up`, `peer_down`, `drain`,
`stop` call the actor directly (asyncio actors), or queue until `pump_events` (the executor's way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epicycle.actors.ports import Hosted
from epicycle.transport.config import Config
from epicycle.transport.doorbell import Pollable, wait_readable
from epicycle.transport.wire.control import Capabilities, Drain, Endpoint, HealthReply, PeerDown, PeerUp
from tests.fakes.fabric import FakeFabric


class FakeHost:
    """One per actor; hosts that share `fabric` can reach each other."""

    def __init__(
        self, name: str, epoch: int = 1, config: Config | None = None, fabric: FakeFabric | None = None
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.config = config if config is not None else Config()
        self.fabric = fabric if fabric is not None else FakeFabric()
        self.actor: Hosted | None = None
        self.endpoints: list[Endpoint] = []
        self.capabilities: Capabilities | None = None
        self.is_ready = False
        self.is_drained = False
        self.fatals: list[tuple[str, str]] = []
        self.health_reply = HealthReply(ref=0, status="healthy", instance_state="running", problems=[], actors=[])
        self.waits = 0
        self._events: list[Callable[[], None]] = []

    def ready(self, endpoints: list[Endpoint], capabilities: Capabilities | None = None) -> None:
        self.endpoints, self.capabilities, self.is_ready = endpoints, capabilities, True

    def drained(self) -> None:
        self.is_drained = True

    def fatal(self, code: str, message: str) -> None:
        self.fatals.append((code, message))

    async def health(self, is_deep: bool = False) -> HealthReply:
        return self.health_reply

    def pump_events(self) -> int:
        """Run what the supervisor has said since the last call; returns how many calls that was."""
        events, self._events = self._events, []
        for event in events:
            event()
        return len(events)

    def wait(self, receivers: Sequence[Pollable], timeout_s: float) -> bool:
        """Tests never wait: what isn't there now will not come by waiting. The call is counted."""
        self.waits += 1
        return bool(self._events) or wait_readable(receivers, 0.0)

    def as_peer(self) -> PeerUp:
        """What the supervisor would tell others about this actor, once it is ready."""
        assert self.is_ready, f"{self.name} has not said Ready"
        return PeerUp(name=self.name, epoch=self.epoch, endpoints=self.endpoints, capabilities=self.capabilities)

    def peer_up(self, message: PeerUp, *, is_queued: bool = False) -> None:
        self._call(lambda actor: actor.on_peer_up(message), is_queued)

    def peer_down(self, message: PeerDown, *, is_queued: bool = False) -> None:
        self._call(lambda actor: actor.on_peer_down(message), is_queued)

    def drain(self, message: Drain, *, is_queued: bool = False) -> None:
        self._call(lambda actor: actor.on_drain(message), is_queued)

    def stop(self, *, is_queued: bool = False) -> None:
        self._call(lambda actor: actor.on_stop(), is_queued)

    def _call(self, call: Callable[[Hosted], None], is_queued: bool) -> None:
        def event() -> None:
            assert self.actor is not None, f"nobody set {self.name}'s actor"
            call(self.actor)

        if is_queued:
            self._events.append(event)
        else:
            event()
