"""A whole server in one loop for e2e tests: the real gateway, control and executor with the mock pump, fake hosts.

HTTP runs over a real socket. The executor takes a turn whenever it has something to do and `ticks_left` allows it, so
that a test can stop the world between two tokens without any timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

from epicycle.actors.control import Control
from epicycle.actors.executor import Executor
from epicycle.actors.gateway.app import Gateway
from epicycle.actors.host import LOOP_LAG
from epicycle.transport.config import Config, ExecutorConfig
from epicycle.transport.wire.control import ActorHealth, HealthReply, PeerDown
from tests.fakes.fabric import FakeFabric
from tests.fakes.host import FakeHost

MOCK = Config(executor=ExecutorConfig(kind="mock"))
UNLIMITED = 1 << 60


async def until(is_met: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds; bounded by the test's own timeout."""
    while not is_met():  # noqa: ASYNC110 - the condition is another actor's state, nobody can set an event for it
        await asyncio.sleep(0)


class StackHost(FakeHost):
    """A FakeHost whose health is made of what the actors of the stack say."""

    stack: Stack

    async def health(self, is_deep: bool = False) -> HealthReply:
        if self.stack.is_supervisor_silent:
            raise TimeoutError
        facts = {host: host.actor.beat_facts() for host in self.stack.hosts if host.actor is not None}
        actors = [
            ActorHealth(
                *(host.name, 1, "ready", host.epoch, 0, 0.0, 0.0, 0, 0, 0),
                counters={**told.counters, LOOP_LAG: 0.0},
                mailboxes=told.mailboxes,
            )
            for host, told in facts.items()
        ]
        return msgspec.structs.replace(self.health_reply, actors=actors)


class Stack:
    """`async with Stack(config) as stack`: ready to be asked at `stack.base_url`."""

    def __init__(self, config: Config = MOCK) -> None:
        self.config = config
        self.fabric = FakeFabric()
        self.ticks_left = UNLIMITED
        self.is_supervisor_silent = False
        self.hosts: list[StackHost] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._go = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Stack:
        self.control_host = self._host("control")
        self.control = Control(self.control_host)
        self.gateway_host = self._host("gw0")
        self.gateway = Gateway(self.gateway_host, self._socket)
        self.gateway_host.actor, self.control_host.actor = self.gateway, self.control
        for actor in (self.control, self.gateway):
            self._tasks.append(asyncio.create_task(actor.run()))
        await until(lambda: self.gateway_host.is_ready and self.control_host.is_ready)
        self.gateway_host.peer_up(self.control_host.as_peer())
        self.control_host.peer_up(self.gateway_host.as_peer())
        self.start_executor(1)
        await until(lambda: self.gateway.core.is_known_to_control)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None and self.control_host.is_ready and self.executor_host in self.hosts:
            await self.assert_clean()
        self.gateway.on_stop()
        self.control.on_stop()
        self._runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._runner
        await asyncio.gather(*self._tasks)
        self.fabric.close()

    async def assert_clean(self) -> None:
        """Whatever a test did, in the end every page is free or cached and the count of the pool adds up."""
        self.allow(UNLIMITED)
        self.fabric.blocked.clear()
        await self.until_resident(0)
        census = self.control.snapshot()
        assert (census.total, True, True) == (census.free + census.prefix, census.is_even, census.is_idle), census
        assert 0 == self.control.kv.uneven_censuses

    def start_executor(self, epoch: int, *, is_control_told: bool = True) -> None:
        """Without `is_control_told` the news is still on its way to control: `tell_control` delivers it."""
        host = self._host("ex0", epoch)
        self.executor_host, self.executor = host, Executor(host)
        host.actor = self.executor
        self.executor.start()
        for peer in (self.gateway_host, self.control_host):
            host.peer_up(peer.as_peer())
        self.gateway_host.peer_up(host.as_peer())
        if is_control_told:
            self.tell_control()
        self._runner = asyncio.create_task(self._run_executor())

    def tell_control(self) -> None:
        self.control_host.peer_up(self.executor_host.as_peer())

    async def kill_executor(self) -> None:
        self._runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._runner
        self.hosts.remove(self.executor_host)
        for peer in (self.gateway_host, self.control_host):
            peer.peer_down(PeerDown("ex0", self.executor_host.epoch, "killed by the test"))

    def lose_control(self) -> None:
        self.gateway_host.peer_down(PeerDown("control", self.control_host.epoch, "killed by the test"))

    def allow(self, ticks: int) -> None:
        """Let the executor do `ticks` more turns with work, then stand still."""
        self.ticks_left = ticks
        self._go.set()

    @property
    def resident(self) -> int:
        """Requests that hold a slot or wait for one."""
        return self.control.beat_facts().pending

    async def until_resident(self, count: int) -> None:
        """Until control holds exactly `count` requests; bounded by the test's own timeout."""
        await until(lambda: self.resident == count)

    def _host(self, name: str, epoch: int = 1) -> StackHost:
        host = StackHost(name, epoch, self.config, self.fabric)
        host.stack = self
        self.hosts.append(host)
        return host

    async def _run_executor(self) -> None:
        loop, plans = asyncio.get_running_loop(), self.executor._plans
        loop.add_reader(plans.fileno(), self._go.set)
        try:
            while True:
                while self.ticks_left > 0 and self.executor.step():
                    self.ticks_left -= 1
                    await asyncio.sleep(0)
                self._go.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.002):  # refused sends are tried again
                        await self._go.wait()
        finally:
            loop.remove_reader(plans.fileno())
