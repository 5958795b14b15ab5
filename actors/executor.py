"""The executor: turns plans into ticks and ticks into messages, on one thread that never waits for another process.

Owns the pump, the plan receiver, and what is on its way to gateways and control. It must not know tensors (the engine
is imported only when it is the configured kind) nor why the scheduler plans what it plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import msgspec
import structlog

from epicycle.actors import child
from epicycle.actors.mock_pump import MockEngine
from epicycle.actors.peer_names import gateway_number
from epicycle.actors.ports import BeatFacts, Host, StepOutput, TickPump, TransferPort
from epicycle.actors.step_reports import merge_reports
from epicycle.actors.token_outbox import TokenOutboxes
from epicycle.transport.config import Config, TransferConfig
from epicycle.transport.doorbell import Pollable
from epicycle.transport.executors import config_for
from epicycle.transport.link import DRAIN_LIMIT, Receiver
from epicycle.transport.outbox import Outbox
from epicycle.transport.wire.control import Capabilities, Drain, Endpoint, MailboxStat, PeerDown, PeerUp
from epicycle.transport.wire.plan import Plan, Reset, ToExecutor
from epicycle.transport.wire.transfer import ToPeer

IDLE_S = 0.25  # the longest wait; the host sees from it that the loop turns
RETRY_S = 0.002  # while a link has refused something

_log = structlog.get_logger()


class ExecutorHost(Host, Protocol):
    """A host whose actor has a thread of its own and asks for its events."""

    def pump_events(self) -> object:
        """Run what the supervisor has said, on this thread."""

    def wait(self, receivers: Sequence[Pollable], timeout_s: float) -> bool:
        """Block until a receiver or the supervisor may have something, or the time is over."""


class LoadedEngine(Protocol):
    """What makes pumps: the engine on torch, or the mock."""

    def capabilities(self) -> Capabilities: ...

    def canary(self) -> None:
        """Decode a token end to end; raises when that fails."""

    def open_port(
        self, config: TransferConfig, name: str, epoch: int, receiver: Receiver[ToPeer]
    ) -> TransferPort | None:
        """A way to exchange KV with other executors, for pumps made from then on; None where there can't be one."""

    def new_pump(self, epoch: int) -> TickPump: ...

    def beat_counters(self) -> dict[str, float]:
        """What the engine adds to heartbeats, by the names of /metrics. Cheap; called from another thread."""


def _load_engine(config: Config) -> LoadedEngine:
    from epicycle.engine.engine import Engine

    return Engine.load(config.engine, lambda stage: _log.info("loading", stage=stage))


KINDS: dict[str, Callable[[Config], LoadedEngine]] = {"engine": _load_engine, "mock": MockEngine}


class Executor:
    """Meets SyncActor. `start` and `turn` are `run` in pieces, which is how tests drive it."""

    def __init__(self, host: ExecutorHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._tokens = TokenOutboxes()
        self._reports = Outbox("reports", 1, merge_reports)
        self._engine: LoadedEngine | None = None
        self._pump: TickPump | None = None
        self._port: TransferPort | None = None
        self._postponed: deque[ToExecutor] = deque()  # while transfers from before a Reset end
        self._reports_made = 0
        self._resident = 0  # joined and not ended, as far as messages tell
        self._has_work = False
        self._stale_messages = 0
        self._control_epoch = 0
        self._drain_by_s: float | None = None
        self._is_stopped = False

    def run(self) -> None:
        """Load, say Ready, tick until on_stop. What a tick raises ends the process: the host reports it."""
        self.start()
        while not self._is_stopped:
            self.turn()
        self._tokens.close()
        self._reports.disconnect()
        self._plans.close()
        if self._port is not None:
            self._port.close()

    def start(self) -> None:
        """Bind first, so that nobody finds a dead address; then load, and decode one token before saying Ready."""
        host = self._host
        self._plans = cast("Receiver[ToExecutor]", host.fabric.bind(host.name, host.epoch, "plan", ToExecutor))
        config = config_for(host.config, host.name)
        engine = KINDS[host.config.executor.kind](config)
        engine.canary()
        endpoints = [Endpoint(self._plans.link, self._plans.address)]
        if config.transfer.connector != "off":
            endpoints += self._open_port(engine, config.transfer)
        self._engine, self._pump = engine, engine.new_pump(host.epoch)
        capabilities = engine.capabilities()
        if host.config.server.served_model_name:
            capabilities = msgspec.structs.replace(capabilities, model_id=host.config.server.served_model_name)
        _log.info("pool", actor=host.name, plan=capabilities.plan_line)
        host.ready(endpoints, capabilities)

    def _open_port(self, engine: LoadedEngine, config: TransferConfig) -> list[Endpoint]:
        host = self._host
        receiver = cast("Receiver[ToPeer]", host.fabric.bind(host.name, host.epoch, "transfer", ToPeer))
        self._port = engine.open_port(config, host.name, host.epoch, receiver)
        if self._port is None:
            receiver.close()
            return []
        self._port.start()
        return [Endpoint(receiver.link, receiver.address)]

    def turn(self) -> None:
        """One round: the supervisor's words, plans, a tick, its results; waits only when there was nothing to do."""
        self._host.pump_events()
        if self._is_stopped:
            return
        if not self.step():
            waited: list[Pollable] = [self._plans] if self._port is None else [self._plans, self._port]
            self._host.wait(waited, RETRY_S if self._has_unsent() else IDLE_S)

    def step(self) -> bool:
        """Whether anything was done. Never waits."""
        assert self._pump is not None, "start() comes first"
        messages = self._plans.drain()
        self._postponed.extend(messages)
        while self._postponed and (self._port is None or self._port.is_quiet):
            self._obey(self._pump, self._postponed.popleft())
        self._has_work = self._pump.has_work()
        if self._has_work:
            self._pump.tick()
            self._dispatch(self._pump.collect())
        if self._has_unsent():
            self._tokens.flush()
            self._reports.flush()
        self._check_drain()
        return self._has_work or len(messages) == DRAIN_LIMIT

    def _obey(self, pump: TickPump, message: ToExecutor) -> None:
        match message:
            case Plan(control_epoch=control_epoch) if control_epoch == self._control_epoch:
                pump.apply(message)
                self._resident += len(message.joins) + len(message.resumes)
            case Reset(epoch=epoch, control_epoch=control_epoch) if self._is_news(epoch, control_epoch):
                pump.reset(control_epoch)
                self._control_epoch = control_epoch
                self._resident = 0
            case Plan() | Reset():  # a dead control's last words, read after its successor's first
                self._stale_messages += 1
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")

    def _is_news(self, epoch: int, control_epoch: int) -> bool:
        return epoch == self._host.epoch and control_epoch > self._control_epoch

    def _dispatch(self, output: StepOutput) -> None:
        if output.report is not None:
            self._reports_made += 1
            self._reports.push(output.report)
            left = len(output.report.freed_slots) + len(output.report.saved_slots)
            self._resident = max(0, self._resident - left // 4)
        for gateway, messages in output.to_gateways.items():
            self._tokens.push(gateway, messages)

    def _has_unsent(self) -> bool:
        return len(self._tokens) > 0 or len(self._reports) > 0

    def on_peer_up(self, message: PeerUp) -> None:
        number = gateway_number(message.name)
        links = {end.link: end.address for end in message.endpoints}
        if number is not None:
            self._tokens.connect(number, self._host.fabric.connect(links["tokens"]))
        elif "reports" in links:
            self._reports.connect(self._host.fabric.connect(links["reports"]))
        elif "transfer" in links and self._port is not None:
            self._port.peer_up(message.name, message.epoch, self._host.fabric.connect(links["transfer"]))

    def on_peer_down(self, message: PeerDown) -> None:
        """A dead gateway's tokens are dropped; reports for a dead control too, the next one starts with a Reset."""
        number = gateway_number(message.name)
        if number is not None:
            self._tokens.drop(number)
        elif message.name == "control":
            self._reports.disconnect()
        elif self._port is not None:
            self._port.peer_down(message.name, message.epoch)

    def on_drain(self, message: Drain) -> None:
        self._drain_by_s = self._clock() + message.deadline_ms / 1e3

    def _check_drain(self) -> None:
        """Control empties the slots; here it only remains to say when nothing is left, or the time is over."""
        if self._drain_by_s is None:
            return
        if (not self._has_work and not self._has_unsent()) or self._clock() >= self._drain_by_s:
            self._drain_by_s = None
            self._host.drained()

    def on_stop(self) -> None:
        self._is_stopped = True

    def beat_facts(self) -> BeatFacts:
        return BeatFacts(
            progress=self._reports_made + (self._pump.counters.ticks if self._pump is not None else 0),
            pending=max(1, self._resident) if self._has_work else 0,
            mailboxes=[MailboxStat("tokens", len(self._tokens)), MailboxStat("reports", len(self._reports))],
            counters={
                'send_again_total{link="tokens"}': self._tokens.refused_sends,
                "merged_token_rows_total": self._tokens.merged_rows,
                f'stale_messages_total{{actor="{self._host.name}"}}': self._stale_messages,
                **(self._engine.beat_counters() if self._engine is not None else {}),
            },
        )


def make_actor(host: ExecutorHost) -> Executor:
    return Executor(host)


if __name__ == "__main__":
    child.run_sync(make_actor)
