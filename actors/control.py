"""The control process: admission, scheduler and kv actor, wired to their links and turned by one loop.

Owns the receivers, the plan and verdict senders, and the order in which the actors take turns. It must not know what
any of them decides. `turn` is the whole process without its loop, which is how tests drive it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import structlog

from epicycle.actors import child
from epicycle.actors.admission import Admission
from epicycle.actors.control_counters import counters
from epicycle.actors.control_messages import ExecutorDown, ExecutorUp, GatewayLost, StartDrain, WithdrawAll
from epicycle.actors.kv import NOTHING, KvActor
from epicycle.actors.leases import reserve_rule
from epicycle.actors.peer_names import gateway_number
from epicycle.actors.ports import BeatFacts, Host
from epicycle.actors.routes import PREFILL
from epicycle.actors.scheduler import Scheduler
from epicycle.actors.verdict_outboxes import VerdictOutboxes
from epicycle.transport.attach import Attachment, attach
from epicycle.transport.executors import executor_specs
from epicycle.transport.link import Receiver, Sender
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Drain, Endpoint, PeerDown, PeerUp
from epicycle.transport.wire.kv import Census, Snapshot
from epicycle.transport.wire.plan import FromExecutor, StepReport
from epicycle.transport.wire.request import Admitting, Cancel, FromSubmitLink, ResetCache

TIMER_S = 0.05  # deadlines, idle census
RETRY_S = 0.002  # while a link has refused something

_log = structlog.get_logger()


class Control:
    """Meets Hosted. All methods on the loop's thread except `beat_facts`, which only reads numbers."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._verdicts = VerdictOutboxes()
        self._executors: dict[str, PeerUp] = {}
        self._roles = {spec.name: spec.role for spec in executor_specs(host.config)}
        self._unmet = {name for name, role in self._roles.items() if role == PREFILL}  # by this control
        self._drain_by_s: float | None = None
        self._is_drained = False
        self._idle_turns = 0
        self._stopped = asyncio.Event()
        self._census = NOTHING
        self._wire_actors()
        self._bind()

    def _wire_actors(self) -> None:
        config = self._host.config
        self.kv = KvActor(self._clock, lambda: self.scheduler.units, self._take_census)
        self.admission = Admission(
            config,
            self._clock,
            lambda message: self.scheduler.inbox.post(message),
            self._verdicts.push,
            lambda facts: reserve_rule(config.scheduler, facts),
            lambda epoch: self.scheduler.unit(epoch),
        )
        self.scheduler = Scheduler(
            config,
            self._host.epoch,
            self._clock,
            self.admission.inbox,
            self.kv.inbox,
            self._verdicts.push,
            self._connect_executor,
        )

    def _bind(self) -> None:
        host = self._host
        self._submits = cast(
            "Receiver[FromSubmitLink]", host.fabric.bind(host.name, host.epoch, "submit", FromSubmitLink)
        )
        self._cancels = cast("Receiver[Cancel]", host.fabric.bind(host.name, host.epoch, "cancel", Cancel))
        self._reports = cast("Receiver[StepReport]", host.fabric.bind(host.name, host.epoch, "reports", FromExecutor))

    @property
    def receivers(self) -> tuple[Receiver[FromSubmitLink], Receiver[Cancel], Receiver[StepReport]]:
        return (self._submits, self._cancels, self._reports)

    def announce(self) -> None:
        """Say Ready: the links are bound. Nothing is admitted before an executor is up."""
        self._host.ready([Endpoint(receiver.link, receiver.address) for receiver in self.receivers])

    async def run(self) -> None:
        """Serve until on_stop."""
        loop = asyncio.get_running_loop()
        attachments: list[Attachment] = [
            attach(loop, self._submits, self.take_requests),
            attach(loop, self._cancels, self.take_requests),
            attach(loop, self._reports, self.take_reports),
        ]
        self.announce()
        timer = asyncio.create_task(self._keep_turning())
        try:
            await self._stopped.wait()
        finally:
            timer.cancel()
            for attachment in attachments:
                attachment.close()
            self.close()

    def close(self) -> None:
        self._verdicts.close()
        for receiver in self.receivers:
            receiver.close()

    def take_requests(self, messages: list[FromSubmitLink | Cancel]) -> None:
        for message in messages:
            if isinstance(message, ResetCache):
                self.scheduler.inbox.post(message)
            else:
                self.admission.inbox.post(message)
        self.turn()

    def take_reports(self, messages: list[StepReport]) -> None:
        self.scheduler.inbox.extend(messages)
        self.turn()

    def turn(self) -> None:
        """Every actor handles its inbox until nobody has anything to say; then the executor hears it all at once."""
        if self._stopped.is_set():  # the links are closed or about to be: peers that leave too change nothing
            return
        while True:
            self.scheduler.turn()
            self.admission.turn()
            if not len(self.scheduler.inbox):
                break
        self.scheduler.flush()
        self._verdicts.flush()
        self.kv.turn()
        if self._drain_by_s is not None:
            self._check_drain(self._drain_by_s)

    def snapshot(self) -> Census:
        """The pool counted now, by way of the kv actor's inbox."""
        self.kv.inbox.post(Snapshot(ref=self._census.ref + 1))
        self.kv.turn()
        return self._census

    def _take_census(self, census: Census) -> None:
        self._census = census

    async def _keep_turning(self) -> None:
        """Deadlines pass and refused sends are repeated although nothing arrives."""
        while True:
            await asyncio.sleep(RETRY_S if self._has_unsent() else TIMER_S)
            self.turn()
            # Whatever is pending now waits for somebody else: for control that is progress, the loop turns.
            self._idle_turns += 1

    def _has_unsent(self) -> bool:
        return self.scheduler.has_pending or len(self._verdicts) > 0

    def _connect_executor(self, name: str) -> Sender:
        address = next(end.address for end in self._executors[name].endpoints if end.link == "plan")
        return self._host.fabric.connect(address)

    def on_peer_up(self, message: PeerUp) -> None:
        number = gateway_number(message.name)
        if number is not None:
            address = next(end.address for end in message.endpoints if end.link == "verdicts")
            self._verdicts.connect(number, self._host.fabric.connect(address))
            self._verdicts.push(number, self._admitting())
        elif message.capabilities is not None and message != self._executors.get(message.name):
            self._lose_executor(message.name, "another one has taken its place")
            self._executors[message.name] = message
            self._unmet.discard(message.name)
            role = self._roles.get(message.name, "full")
            self._tell(ExecutorUp(message.name, message.epoch, message.capabilities, role))
        self.turn()

    def on_peer_down(self, message: PeerDown) -> None:
        number = gateway_number(message.name)
        executor = self._executors.get(message.name)
        if number is not None:
            self._verdicts.drop(number)
            self._tell(GatewayLost(number))
        elif executor is not None and executor.epoch == message.epoch:
            self._lose_executor(message.name, message.reason)
        self.turn()

    def _lose_executor(self, name: str, reason: str) -> None:
        executor = self._executors.pop(name, None)
        if executor is not None:
            self._tell(ExecutorDown(executor.epoch, reason))

    def _tell(self, message: ExecutorUp | ExecutorDown | GatewayLost) -> None:
        """Inboxes keep the order: whatever a gateway sends once it has heard of it here is handled after it."""
        self.scheduler.inbox.post(message)
        self.admission.inbox.post(message)
        if not isinstance(message, GatewayLost):
            self._verdicts.tell_all(self._admitting())

    def _admitting(self) -> Admitting:
        """A split that starts is not ready while a role is still loading; later its prefill executors may be away."""
        if self._unmet:
            return Admitting(self._host.epoch)
        decoding = [peer.epoch for peer in self._executors.values() if self._roles.get(peer.name) != PREFILL]
        return Admitting(self._host.epoch, pack(I32, decoding))

    def on_drain(self, message: Drain) -> None:
        self._drain_by_s = self._clock() + message.deadline_ms / 1e3
        self.admission.inbox.post(StartDrain())
        self.turn()

    def on_stop(self) -> None:
        self._stopped.set()

    def _check_drain(self, drain_by_s: float) -> None:
        """Say Drained once; abort what still runs when the time is over."""
        if self._is_drained:
            return
        if self.scheduler.running == 0 and not self._has_unsent():
            self._is_drained = True
            self._host.drained()
        elif self._clock() >= drain_by_s:
            self._drain_by_s = float("inf")
            self.scheduler.inbox.post(WithdrawAll("shutdown", "the server is shutting down"))
            self.turn()

    def beat_facts(self) -> BeatFacts:
        admission, scheduler = self.admission, self.scheduler
        return BeatFacts(
            progress=admission.progress + scheduler.progress + self._idle_turns,
            pending=admission.waiting + scheduler.running,
            mailboxes=[actor.inbox.stat() for actor in (admission, scheduler, self.kv)],
            last_error=self.kv.last_error,
            counters=counters(self.admission, self.scheduler, self.kv, self._verdicts.refused_sends, self._roles),
        )


def make_actor(host: Host) -> Control:
    return Control(host)


if __name__ == "__main__":
    child.run(make_actor)
