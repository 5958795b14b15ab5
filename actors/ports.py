"""The seams of an actor: how it meets its process (Host), its executor (TickPump), and the rest through links.

Protocols only, so that each side can be faked. An actor never learns whether its host is a process of its own or a
corner of a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epicycle.transport.config import Config
from epicycle.transport.link import Fabric, Sender
from epicycle.transport.wire.control import Capabilities, Drain, Endpoint, HealthReply, MailboxStat, PeerDown, PeerUp
from epicycle.transport.wire.output import ToGateway
from epicycle.transport.wire.plan import Plan, StepReport


@dataclass
class BeatFacts:
    """What an actor tells about itself with every heartbeat; read from another thread, so it must be cheap and pure."""

    progress: int = 0
    pending: int = 0
    mailboxes: list[MailboxStat] = field(default_factory=list)
    last_error: str = ""
    counters: dict[str, float] = field(default_factory=dict)


class Hosted(Protocol):
    """What a host calls on the actor (or group of actors) it carries. All on the actor's own loop or thread."""

    def on_peer_up(self, message: PeerUp) -> None: ...

    def on_peer_down(self, message: PeerDown) -> None: ...

    def on_drain(self, message: Drain) -> None:
        """Begin to drain; call host.drained() when nothing is left."""

    def on_stop(self) -> None:
        """Leave the run loop; the host's run() then returns."""

    def beat_facts(self) -> BeatFacts: ...


class Host(Protocol):
    """What an actor may ask of its process."""

    name: str
    epoch: int
    config: Config
    fabric: Fabric

    def ready(self, endpoints: list[Endpoint], capabilities: Capabilities | None = None) -> None: ...

    def drained(self) -> None: ...

    def fatal(self, code: str, message: str) -> None:
        """Report the error and leave with a non-zero exit code."""

    async def health(self, is_deep: bool = False) -> HealthReply:
        """The supervisor's view. Raises TimeoutError when it doesn't answer."""


class Actor(Hosted, Protocol):
    """What `make_actor(host)` of an asyncio child returns."""

    async def run(self) -> None:
        """Bind, say host.ready(...), serve; returns after on_stop."""


class SyncActor(Hosted, Protocol):
    """What the executor's `make_actor(host)` returns; `run` occupies the calling thread until on_stop."""

    def run(self) -> None: ...


class TransferPort(Protocol):
    """How an executor exchanges prompts' KV with others; `transport/wire/transfer.py` says what for. It runs on a
    thread of its own, and is readable while the pump has something to hear from it."""

    def start(self) -> None: ...

    def peer_up(self, name: str, epoch: int, sender: Sender) -> None: ...

    def peer_down(self, name: str, epoch: int) -> None: ...

    @property
    def is_quiet(self) -> bool:
        """No transfer from before the pump's last reset touches the pool."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class StepOutput(Protocol):
    """What a pump has completed: the report for the scheduler, and messages by gateway number, in order."""

    @property
    def report(self) -> StepReport | None: ...

    @property
    def to_gateways(self) -> Mapping[int, Sequence[ToGateway]]: ...


class TickCounters(Protocol):
    """What the executor reads of a pump's counters; a hung device shows in ticks that no longer grow."""

    @property
    def ticks(self) -> int: ...


class TickPump(Protocol):
    """The device side of an executor. Called from one thread; never waits, never touches a socket."""

    @property
    def counters(self) -> TickCounters: ...

    def apply(self, plan: Plan) -> None:
        """Evicts, grows, joins. A plan of another epoch is dropped and counted, so is a join for a busy slot."""

    def reset(self, control_epoch: int) -> None:
        """Drop every slot without Fin; the next report is empty and carries `control_epoch`."""

    def has_work(self) -> bool:
        """Some row could run now, or something is launched or waits to be collected."""

    def tick(self) -> None:
        """Launch one tick; returns at once when no row can run."""

    def collect(self) -> StepOutput:
        """Harvest what is complete."""
