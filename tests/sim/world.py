"""The whole server in one thread of a test: control, a mock executor and fake gateways over in-memory links.

Nothing sleeps and nothing races: a `step` turns everybody once, in a fixed order, and time moves when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from epicycle.actors.control import Control
from epicycle.actors.executor import Executor
from epicycle.actors.mock_model import mock_key, mock_token
from epicycle.transport.config import Config
from epicycle.transport.executors import executor_specs
from epicycle.transport.link import Receiver
from epicycle.transport.wire.columns import I32, pack, unpack
from epicycle.transport.wire.control import Drain, Endpoint, PeerDown
from tests.fakes.clock import FakeClock
from tests.fakes.fabric import FakeFabric
from tests.fakes.gateway import FakeGateway
from tests.fakes.host import FakeHost

LOOPS = 4  # of the model the mock claims to be


def make_config(
    *,
    pages: int = 64,
    slots: int = 4,
    chunk_tokens: int = 0,
    prefix_cache: bool = False,
    replicas: int = 0,
    split: tuple[int, int] = (0, 0),
    least_tokens: int = 0,
    **scheduler: Any,
) -> Config:
    """A small server: 16 positions a page, a context of at most 1,024, and nothing cached unless asked for.

    `split`: executors that compute prompts, and executors that decode.
    """
    config = Config()
    replace = msgspec.structs.replace
    return replace(
        config,
        engine=replace(config.engine, slots=slots, prompt_chunk_tokens=chunk_tokens),
        executor=replace(
            config.executor,
            kind="mock",
            mock_pages=pages,
            replicas=["cpu"] * replicas,
            prefill=["cpu"] * split[0],
            decode=["cpu"] * split[1],
        ),
        transfer=replace(config.transfer, least_tokens=least_tokens),
        scheduler=replace(config.scheduler, prefix_cache=prefix_cache, **scheduler),
    )


def expected_tokens(prompt_tokens: int, count: int) -> list[int]:
    """What the mock says to the prompt that `FakeGateway.submit` makes."""
    key = mock_key(unpack(I32, pack(I32, range(10, 10 + prompt_tokens))))
    return [mock_token(key, index) for index in range(count)]


class World:
    """`gateways`, control and the executors that `config` asks for are up and know each other; `executor=False` leaves
    the executors out."""

    def __init__(self, config: Config | None = None, *, gateways: int = 1, executor: bool = True) -> None:
        self.config = config if config is not None else make_config()
        self.clock = FakeClock()
        self.fabric = FakeFabric()
        self.executors: dict[str, Executor] = {}
        self.executor_hosts: dict[str, FakeHost] = {}
        self.gateways: list[FakeGateway] = []
        self.gateway_hosts: list[FakeHost] = []
        self.control_host, self.control = self._make_control(1)
        for number in range(gateways):
            self.start_gateway(number)
        self.roles = {spec.name: spec.role for spec in executor_specs(self.config)}
        for epoch, name in enumerate(self.roles if executor else (), start=1):
            self.start_executor(epoch, name)

    @property
    def executor(self) -> Executor | None:
        return self.executors.get("ex0")

    @property
    def executor_host(self) -> FakeHost | None:
        return self.executor_hosts.get("ex0")

    @property
    def gateway(self) -> FakeGateway:
        return self.gateways[0]

    def _make_control(self, epoch: int) -> tuple[FakeHost, Control]:
        host = FakeHost("control", epoch, self.config, self.fabric)
        control = Control(host, self.clock)
        host.actor = control
        control.announce()
        return host, control

    def start_gateway(self, number: int, epoch: int = 1) -> None:
        host = FakeHost(f"gw{number}", epoch, self.config, self.fabric)
        gateway = FakeGateway(host)
        host.ready([_endpoint(gateway.verdicts), _endpoint(gateway.tokens)])
        self.gateways[number:] = [gateway]
        self.gateway_hosts[number:] = [host]
        gateway.meet_control(self.control_host.as_peer())
        self.control_host.peer_up(host.as_peer())
        for executor_host in self.executor_hosts.values():
            executor_host.peer_up(host.as_peer())

    def start_executor(self, epoch: int = 1, name: str = "ex0") -> None:
        """`epoch` must be one that no executor has had."""
        host = FakeHost(name, epoch, self.config, self.fabric)
        executor = Executor(host, self.clock)
        self.executors[name], self.executor_hosts[name] = executor, host
        host.actor = executor
        executor.start()
        for peer in (self.control_host, *self.gateway_hosts):
            host.peer_up(peer.as_peer())
        self.control_host.peer_up(host.as_peer())
        self.step()

    def kill_executor(self, name: str = "ex0") -> None:
        epoch = self.executor_hosts[name].epoch
        del self.executors[name], self.executor_hosts[name]
        self.control_host.peer_down(PeerDown(name, epoch, "killed by the test"))
        for gateway in self.gateways:
            gateway.lose_executor(epoch)

    def kill_gateway(self, number: int) -> None:
        message = PeerDown(f"gw{number}", self.gateway_hosts[number].epoch, "killed by the test")
        self.control_host.peer_down(message)
        for executor_host in self.executor_hosts.values():
            executor_host.peer_down(message)

    def restart_control(self) -> None:
        """A new control with nothing in its head; executor and gateways stay."""
        epoch = self.control_host.epoch
        for executor_host in self.executor_hosts.values():
            executor_host.peer_down(PeerDown("control", epoch, "killed by the test"))
        self.control_host, self.control = self._make_control(epoch + 1)
        for gateway, host in zip(self.gateways, self.gateway_hosts, strict=True):
            gateway.meet_control(self.control_host.as_peer())
            self.control_host.peer_up(host.as_peer())
        for executor_host in self.executor_hosts.values():
            executor_host.peer_up(self.control_host.as_peer())
            self.control_host.peer_up(executor_host.as_peer())

    def drain(self, deadline_ms: int) -> None:
        self.control_host.drain(Drain(deadline_ms))

    def step_control(self) -> None:
        submits, cancels, reports = (receiver.drain() for receiver in self.control.receivers)
        self.control.take_reports(reports)  # type: ignore[arg-type]
        self.control.take_requests([*submits, *cancels])  # type: ignore[list-item]

    def step_executor(self) -> None:
        for executor in self.executors.values():
            executor.step()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.step_control()
            self.step_executor()
            for gateway in self.gateways:
                gateway.listen()

    def run_until(self, is_met: Callable[[], bool], steps: int = 2000) -> None:
        """Step until it holds; fails after `steps`, as then it never will."""
        for _ in range(steps):
            if is_met():
                return
            self.step()
        raise AssertionError(f"not met in {steps} steps")

    def finish(self, *rids: int) -> list[str]:
        """Step until every rid has its terminal; how each ended. A few steps more show that no second one comes."""
        self.run_until(lambda: all(self.heard(rid).terminals for rid in rids))
        self.step(5)
        return [self.heard(rid).end for rid in rids]

    def heard(self, rid: int) -> Any:
        return self.gateways[rid >> 56].heard[rid]

    def counter(self, name: str) -> float:
        return self.control.beat_facts().counters[name]

    def assert_empty(self) -> None:
        """Nobody waits or runs, and every page is free, or cached."""
        self.run_until(lambda: self.control.beat_facts().pending == 0)
        census = self.control.snapshot()
        assert (census.total, True, True) == (census.free + census.prefix, census.is_even, census.is_idle), census
        assert self.control.kv.uneven_censuses == 0
        for unit in self.control.scheduler.units:
            host = unit.preemption.host_census()
            assert host.free_pages == host.total_pages, host


def _endpoint(receiver: Receiver[Any]) -> Endpoint:
    return Endpoint(receiver.link, receiver.address)
