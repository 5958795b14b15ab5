"""The run loops themselves: control on asyncio and the executor on a thread, woken by their links alone."""

from __future__ import annotations

import asyncio
import threading

from epicycle.actors.control import make_actor as make_control
from epicycle.actors.executor import make_actor as make_executor
from epicycle.actors.host import ThreadHost
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.control import Endpoint, PeerUp, Ready, Stop
from tests.fakes.fabric import FakeFabric
from tests.fakes.gateway import FakeGateway
from tests.fakes.host import FakeHost
from tests.sim.world import expected_tokens, make_config


class Supervisor:
    """The uplink of the executor's host: remembers Ready."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.ready: Ready | None = None

    def send(self, message: Wire) -> None:
        if isinstance(message, Ready):
            self.ready = message
            self.is_ready.set()

    def leave(self, fatal: Wire) -> None:
        raise AssertionError(fatal)


async def test_control_and_executor_serve_when_run_by_their_loops() -> None:
    fabric, config, uplink = FakeFabric(), make_config(), Supervisor()
    control_host, gateway_host = FakeHost("control", 1, config, fabric), FakeHost("gw0", 1, config, fabric)
    control_host.actor = control = make_control(control_host)
    serving = asyncio.create_task(control.run())
    gateway = FakeGateway(gateway_host)
    gateway_host.ready([Endpoint(end.link, end.address) for end in (gateway.verdicts, gateway.tokens)])
    executor_host = ThreadHost("ex0", 1, config, fabric, uplink)  # type: ignore[arg-type]
    executor = make_executor(executor_host)
    executor_host.attach(executor)
    thread = threading.Thread(target=executor.run)
    thread.start()
    assert await asyncio.to_thread(uplink.is_ready.wait, 30)
    assert uplink.ready is not None
    for peer in (control_host.as_peer(), gateway_host.as_peer()):
        executor_host.deliver(peer)
    control_host.peer_up(gateway_host.as_peer())
    control_host.peer_up(PeerUp("ex0", 1, uplink.ready.endpoints, uplink.ready.capabilities))
    gateway.meet_control(control_host.as_peer())
    rids = [gateway.submit(prompt=3 + n, max_tokens=20) for n in range(6)]
    async with asyncio.timeout(30):
        while not all(gateway.heard[rid].terminals for rid in rids):
            await asyncio.sleep(0.001)
            gateway.listen()
    assert [expected_tokens(3 + n, 20) for n in range(6)] == [gateway.heard[rid].tokens for rid in rids]
    executor_host.deliver(Stop("the test is over"))
    control_host.stop()
    await serving
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    executor_host.close()
    fabric.close()
