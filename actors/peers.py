"""The children as the supervisor knows them: one record each, and the rules by which they learn of one another.

A pure state machine: messages, ends of processes and the time go in, messages to children come out through `send`.
Owns epochs and who is Ready; knows neither processes nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from epicycle.actors.host import LOOP_LAG
from epicycle.actors.peer_names import EXECUTOR_KINDS
from epicycle.transport.config import SupervisorConfig
from epicycle.transport.wire.control import (
    Beat,
    Capabilities,
    Drained,
    Endpoint,
    Fatal,
    FromSupervisor,
    Hello,
    PeerDown,
    PeerUp,
    Pong,
    Ready,
)
from epicycle.transport.wire.transfer import mismatch

# kind -> the kinds it connects to, in both directions of a link
NEEDS = {
    "control": (*EXECUTOR_KINDS, "gateway"),
    "gateway": ("control", "executor", "decode"),
    "executor": ("control", "gateway"),
    "decode": ("control", "gateway", "prefill"),
    "prefill": ("control", "decode"),
}
AT_WORK = ("ready", "draining")

_log = structlog.get_logger()


@dataclass
class Peer:
    """One child. Times are seconds of the supervisor's monotonic clock; -1 stands for never."""

    name: str
    kind: str
    epoch: int = 0
    pid: int = 0
    state: str = "starting"  # starting, loading, ready, draining, failed, restarting
    started_s: float = 0.0
    restarts: int = 0
    endpoints: list[Endpoint] = field(default_factory=list)
    capabilities: Capabilities | None = None
    beat: Beat | None = None
    beat_s: float = -1.0
    moved_s: float = 0.0  # when progress last changed or nothing was pending
    is_introduced: bool = False  # this incarnation has said Ready, so partners may be connected to it
    is_drained: bool = False
    last_error: str = ""
    last_error_s: float = -1.0
    pong_s: float = -1.0
    pong_ref: int = -1

    @property
    def is_at_work(self) -> bool:
        return self.state in AT_WORK

    def note_error(self, text: str, now_s: float) -> None:
        self.last_error, self.last_error_s = text, now_s

    def hang(self, config: SupervisorConfig, now_s: float) -> str:
        """Why this child looks hung, in words; empty when it doesn't. Loading and capture are never a hang."""
        if not self.is_at_work or self.beat is None:
            return ""
        beat_age_s = now_s - self.beat_s
        if beat_age_s > config.stale_beat_s:
            return f"no heartbeat for {beat_age_s:.1f} s (supervisor.stale_beat_s = {config.stale_beat_s:g})"
        still_s = now_s - self.turned_s
        if still_s > config.stale_beat_s:
            return f"its loop has not turned for {still_s:.1f} s (supervisor.stale_beat_s = {config.stale_beat_s:g})"
        idle_s = now_s - self.moved_s
        if self.beat.pending > 0 and idle_s > config.watchdog_s:
            return (
                f"{self.beat.pending} pending and no progress for {idle_s:.1f} s "
                f"(supervisor.watchdog_s = {config.watchdog_s:g})"
            )
        return ""

    @property
    def turned_s(self) -> float:
        """When the child's own loop last turned, as far as its last beat tells."""
        return self.beat_s - (self.beat.counters.get(LOOP_LAG, 0.0) if self.beat else 0.0)

    def hung_for_s(self, config: SupervisorConfig, now_s: float) -> float:
        """How long ago the child was last known to be well; 0 when it is."""
        return now_s - min(self.turned_s, self.moved_s) if self.hang(config, now_s) else 0.0


class Peers:
    """The table. `send` takes a name and a message; it may be called for children that are Ready only."""

    def __init__(self, kinds: dict[str, str], send: Callable[[str, FromSupervisor], None]) -> None:
        self.by_name = {name: Peer(name, kind) for name, kind in kinds.items()}
        self.stale_messages = 0
        self._send = send
        self._executor_epochs = 0

    def __iter__(self) -> Iterator[Peer]:
        return iter(self.by_name.values())

    @property
    def are_all_ready(self) -> bool:
        return all(peer.is_at_work for peer in self)

    def start(self, name: str, now_s: float) -> int:
        """A new incarnation of `name` begins; its epoch. The process comes after.

        Executors draw their epochs from one count, so that an epoch alone tells whose message it is.
        """
        peer = self.by_name[name]
        peer.state = "starting" if peer.epoch == 0 else "restarting"
        if peer.kind in EXECUTOR_KINDS:
            self._executor_epochs += 1
            peer.epoch = self._executor_epochs
        else:
            peer.epoch += 1
        peer.pid, peer.started_s = 0, now_s
        peer.beat, peer.beat_s, peer.moved_s = None, -1.0, now_s
        peer.endpoints, peer.capabilities = [], None
        peer.is_introduced = peer.is_drained = False
        return peer.epoch

    def hear(self, message: Hello | Ready | Beat | Drained | Fatal, now_s: float) -> None:
        """A child has spoken. Words of an earlier incarnation are counted and dropped."""
        peer = self.by_name.get(message.name)
        if peer is None or message.epoch != peer.epoch:
            self.stale_messages += 1
            return
        match message:
            case Hello():
                peer.state = "loading" if peer.state == "starting" else "restarting"
            case Ready():
                self._introduce(peer, message)
            case Beat():
                self._take_beat(peer, message, now_s)
            case Drained():
                peer.is_drained = True
            case Fatal():
                peer.state = "failed"
                peer.note_error(f"{message.code}: {message.message}", now_s)
            case _:
                raise AssertionError(f"no rule for {type(message).__name__}")

    def hear_pong(self, message: Pong, now_s: float) -> None:
        peer = self.by_name.get(message.name)
        if peer is not None:
            peer.pong_ref, peer.pong_s = message.ref, now_s

    def bury(self, name: str, reason: str, now_s: float, is_told: bool = True) -> None:
        """The process of `name` is gone: tell those who were connected to it, unless they are leaving themselves."""
        peer = self.by_name[name]
        if peer.state != "failed" or not peer.last_error:  # a Fatal has said it better already
            peer.note_error(reason, now_s)
        peer.state, peer.pid = "failed", 0
        if peer.is_introduced and is_told:
            for other in self._partners(peer):
                self._send(other.name, PeerDown(peer.name, peer.epoch, reason))

    def misfit(self, name: str) -> str:
        """Why `name` can't exchange KV with a partner at work, with both values; empty where it can or needn't."""
        peer = self.by_name[name]
        if peer.kind not in ("prefill", "decode") or peer.capabilities is None:
            return ""
        ours = peer.capabilities.transfer
        if ours is None:
            return f"{name} is to {peer.kind}, but its executor can't exchange KV"
        for other in self._partners(peer):
            theirs = other.capabilities.transfer if other.capabilities is not None else None
            found = mismatch(ours, theirs) if theirs is not None else ""
            if found:
                return f"{name} and {other.name} can't exchange KV: {found}, where here is {name}"
        return ""

    def forgive(self, seconds: float) -> None:
        """The supervisor itself has slept for so long: nobody's silence in that time counts."""
        for peer in self:
            peer.moved_s += seconds
            if peer.beat_s >= 0:
                peer.beat_s += seconds

    def drained(self, kinds: tuple[str, ...]) -> bool:
        """Every living child of these kinds has said Drained."""
        return all(peer.is_drained for peer in self if peer.kind in kinds and peer.pid)

    def _introduce(self, peer: Peer, message: Ready) -> None:
        """`peer` works: it and its partners at work learn of each other, executor first."""
        peer.state, peer.is_introduced = "ready", True
        peer.endpoints, peer.capabilities = message.endpoints, message.capabilities
        for other in self._partners(peer):
            self._send(peer.name, _up(other))
            self._send(other.name, _up(peer))

    def _partners(self, peer: Peer) -> list[Peer]:
        return [other for other in self if other.kind in NEEDS[peer.kind] and other.is_at_work]

    def _take_beat(self, peer: Peer, beat: Beat, now_s: float) -> None:
        is_moving = peer.beat is None or beat.progress != peer.beat.progress or beat.pending == 0
        if is_moving or not peer.is_at_work:
            peer.moved_s = now_s
        if beat.last_error and (peer.beat is None or beat.last_error != peer.beat.last_error):
            peer.note_error(beat.last_error, now_s)
        if beat.state == "draining" and peer.state == "ready":
            peer.state = "draining"
        peer.beat, peer.beat_s = beat, now_s


def _up(peer: Peer) -> PeerUp:
    return PeerUp(peer.name, peer.epoch, peer.endpoints, peer.capabilities)
