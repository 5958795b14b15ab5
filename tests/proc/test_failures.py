"""What clients see when a process dies, hangs or drains: real processes, real HTTP, the mock executor.

Every request in flight gets exactly one terminal within two seconds, /health tells the truth, the service returns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.proc.load import Load, ask, probe
from tests.proc.server import Server, is_alive

COUNT = 8
MOCK = ("--executor", "mock", "--mock-tick-ms", "20", "--slots", str(COUNT))
NAMES = ("ex0", "control", "gw0")


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with Server("epicycle serve", *MOCK, "--set", "supervisor.restart_budget=100") as server:
        yield server.wait_up()


@pytest.fixture
async def server(shared: Server) -> Server:
    """For tests that leave the server as well as it was."""
    await until(lambda: served(shared), "service")
    return shared


@pytest.fixture
async def doomed() -> Iterator[Server]:
    """For tests that end it."""
    with Server("epicycle serve", *MOCK) as server:
        server.wait_up()
        await until(lambda: served(server), "service")
        yield server


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(0.02)


async def served(server: Server) -> bool:
    return await ask(server.port) == 200 and await probe(server.port) == 200


async def running(server: Server) -> float:
    """Requests that hold a slot, as control says."""
    reply = await asyncio.to_thread(server.health)
    return next(actor.counters.get("requests_running", -1.0) for actor in reply.actors if actor.name == "control")


async def kill(server: Server, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
    await asyncio.to_thread(server.kill, name, signum)


@pytest.mark.parametrize("name", NAMES)
async def test_a_kill_while_idle_only_interrupts_the_service(server: Server, name: str) -> None:
    epoch = (await asyncio.to_thread(server.actor, name)).epoch
    await kill(server, name)
    await until(lambda: served(server), "service after the kill")

    assert epoch + 1 == (await asyncio.to_thread(server.actor, name)).epoch


@pytest.mark.parametrize(("name", "expected"), [("ex0", "engine_lost"), ("control", "engine_lost"), ("gw0", "cut")])
async def test_a_kill_under_load_ends_each_request_once_and_soon(server: Server, name: str, expected: str) -> None:
    async with Load(server.port, COUNT) as load:
        await kill(server, name)
        endings = await load.over(2.0)

    assert {expected: COUNT} == endings
    await until(lambda: served(server), "service after the kill")
    async with Load(server.port, COUNT, tokens=5) as again:
        assert {"done": COUNT} == await again.over(10.0)


async def test_health_is_503_between_the_death_of_the_executor_and_its_return(server: Server) -> None:
    await kill(server, "ex0")
    await until(lambda: is_status(server, "/health", 503), "503", 2.0)
    await until(lambda: is_status(server, "/readyz", 503), "not ready", 2.0)
    assert 200 == await probe(server.port, "/livez")
    await until(lambda: is_status(server, "/health", 200), "200")


async def is_status(server: Server, path: str, expected: int) -> bool:
    return await probe(server.port, path) == expected


async def test_a_dead_gateway_leaves_nothing_running(server: Server) -> None:
    async with Load(server.port, COUNT):
        await kill(server, "gw0")
        await until(lambda: is_running(server, 0), "slots freed", 3.0)


async def test_the_death_of_one_gateway_spares_the_requests_of_the_other() -> None:
    with Server("epicycle serve", *MOCK, "--gateways", "2") as server:
        server.wait_up()
        await until(lambda: served(server), "service")
        async with Load(server.port, COUNT, tokens=60) as load:
            await kill(server, "gw1")
            endings = await load.over(10.0)

        assert COUNT == endings["done"] + endings["cut"]
        await until(lambda: served(server), "service after the kill")


async def test_the_death_of_one_replica_spares_the_requests_of_the_other() -> None:
    with Server("epicycle serve", *MOCK, "--replicas", "cpu,cpu") as server:
        server.wait_up()
        await until(lambda: served(server), "service")
        async with Load(server.port, COUNT, tokens=60) as load:
            await kill(server, "ex1")
            endings = await load.over(10.0)

        assert {"done": COUNT // 2, "engine_lost": COUNT // 2} == endings
        await until(lambda: is_status(server, "/health", 200), "both replicas")
        async with Load(server.port, COUNT, tokens=5) as again:
            assert {"done": COUNT} == await again.over(10.0)


async def test_executors_that_can_not_exchange_kv_stop_the_start() -> None:
    with Server("epicycle serve", *MOCK, "--prefill", "cpu", "--decode", "cpu") as server:
        assert 1 == await asyncio.to_thread(server.wait_exit)
        assert "split_mismatch: ex" in server.text()
        assert "its executor can't exchange KV" in server.text()


async def test_replicas_share_a_single_process() -> None:
    with Server("epicycle serve", *MOCK, "--single-process", "--replicas", "cpu,cpu") as server:
        server.wait_up()
        await until(lambda: served(server), "service")
        async with Load(server.port, COUNT, tokens=20) as load:
            assert {"done": COUNT} == await load.over(10.0)
        server.process.terminate()
        assert 0 == await asyncio.to_thread(server.wait_exit)


async def is_running(server: Server, expected: int) -> bool:
    return await running(server) == expected


@pytest.mark.parametrize("count", [0, COUNT], ids=["idle", "loaded"])
async def test_a_stopped_executor_is_unhealthy_and_recovers_with_its_requests(server: Server, count: int) -> None:
    async with Load(server.port, COUNT, tokens=100) if count else Load(server.port, 1, tokens=1) as load:
        await kill(server, "ex0", signal.SIGSTOP)
        await until(lambda: is_status(server, "/health", 503), "503 while stopped", 5.0)
        await kill(server, "ex0", signal.SIGCONT)
        await until(lambda: is_status(server, "/health", 200), "200 after it goes on", 3.0)

        assert {"done": len(load.endings)} == await load.over(10.0)


async def test_sigterm_under_load_finishes_what_runs_and_refuses_what_is_new(doomed: Server) -> None:
    pids = await asyncio.to_thread(doomed.pids)
    async with Load(doomed.port, COUNT, tokens=100) as load:
        doomed.process.terminate()
        await until(lambda: is_refused(doomed), "new requests refused", 2.0)
        doomed.process.terminate()

        assert {"done": COUNT} == await load.over(10.0)
    assert 0 == await asyncio.to_thread(doomed.wait_exit)
    assert not any(map(is_alive, pids))


async def is_refused(server: Server) -> bool:
    return await ask(server.port) == 503


async def test_the_drain_deadline_ends_what_still_runs() -> None:
    with Server("epicycle serve", *MOCK, "--drain", "0.5") as server:
        server.wait_up()
        async with Load(server.port, COUNT) as load:
            server.process.terminate()
            endings = await load.over(4.0)

        assert COUNT == sum(endings.values())
        assert "done" not in endings
        assert 0 == await asyncio.to_thread(server.wait_exit)


async def test_a_second_ctrl_c_cuts_the_drain_short_and_still_ends_each_request_once(doomed: Server) -> None:
    async with Load(doomed.port, COUNT) as load:
        doomed.process.send_signal(signal.SIGINT)
        await until(lambda: is_refused(doomed), "new requests refused", 2.0)
        doomed.process.send_signal(signal.SIGINT)

        assert {"draining": COUNT} == await load.over(3.0)
    assert 0 == await asyncio.to_thread(doomed.wait_exit)


async def test_killing_the_supervisor_under_load_frees_the_port_and_leaves_no_orphans(doomed: Server) -> None:
    pids = await asyncio.to_thread(doomed.pids)
    async with Load(doomed.port, COUNT) as load:
        doomed.process.kill()

        assert {"cut": COUNT} == await load.over(3.0)
    await until(lambda: are_gone(pids), "children gone", 2.0)
    await until(lambda: is_free(doomed.port), "port free", 2.0)


async def is_free(port: int) -> bool:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


async def test_a_single_process_serves_and_drains() -> None:
    with Server("epicycle serve", *MOCK, "--single-process") as server:
        server.wait_up()
        await until(lambda: served(server), "service")
        async with Load(server.port, COUNT, tokens=60) as load:
            os.kill(server.process.pid, signal.SIGTERM)

            assert {"done": COUNT} == await load.over(10.0)
        assert 0 == await asyncio.to_thread(server.wait_exit)
