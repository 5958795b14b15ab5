"""The two hosts: who hears the supervisor on which thread, and what a beat tells."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest

from epicycle.actors.errors import ActorLeft
from epicycle.actors.host import LOOP_LAG, AsyncHost, ThreadHost
from epicycle.actors.ports import BeatFacts
from epicycle.transport.config import Config
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.control import (
    Drain,
    Drained,
    Endpoint,
    Fatal,
    HealthQuery,
    HealthReply,
    PeerDown,
    PeerUp,
    Ping,
    Pong,
    Ready,
    Stop,
    ToSupervisor,
)

UP = PeerUp("control", 1, [])
DOWN = PeerDown("control", 1, "gone")
REPLY = HealthReply(ref=1, status="healthy", instance_state="running", problems=[], actors=[])


class Uplink:
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[ToSupervisor] = []

    def send(self, message: ToSupervisor) -> None:
        self.said.append(message)

    def leave(self, fatal: Fatal) -> NoReturn:
        self.send(fatal)
        raise ActorLeft(fatal.message)


class Actor:
    """Keeps what it heard, and on which thread."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.threads: set[int] = set()
        self.facts = BeatFacts(progress=3, pending=1)

    def _hear(self, what: object) -> None:
        self.heard.append(what)
        self.threads.add(threading.get_ident())

    def on_peer_up(self, message: PeerUp) -> None:
        self._hear(message)

    def on_peer_down(self, message: PeerDown) -> None:
        self._hear(message)

    def on_drain(self, message: Drain) -> None:
        self._hear(message)

    def on_stop(self) -> None:
        self._hear("stop")

    def beat_facts(self) -> BeatFacts:
        return self.facts


def made(kind: type[AsyncHost] | type[ThreadHost]) -> tuple[AsyncHost | ThreadHost, Uplink, Actor]:
    uplink, actor = Uplink(), Actor()
    host = kind("ex0", 2, Config(), LocalFabric(), uplink)
    host.attach(actor)
    return host, uplink, actor


def from_another_thread(host: AsyncHost | ThreadHost, *messages: object) -> None:
    def deliver() -> None:
        for message in messages:
            host.deliver(message)  # type: ignore[arg-type]

    thread = threading.Thread(target=deliver)
    thread.start()
    thread.join()


def test_a_thread_host_hands_events_over_in_order_when_pumped() -> None:
    host, uplink, actor = made(ThreadHost)
    assert isinstance(host, ThreadHost)
    from_another_thread(host, UP, DOWN, Ping(5), Drain(10), Stop())

    assert [] == actor.heard
    assert host.wait([], 0.0)
    assert 5 == host.pump_events()
    assert [UP, DOWN, Drain(10), "stop"] == actor.heard
    assert {threading.get_ident()} == actor.threads
    assert [Pong(5, "ex0")] == uplink.said
    assert not host.wait([], 0.0)
    host.close()


def test_a_thread_host_wakes_for_a_receiver() -> None:
    host, _, _ = made(ThreadHost)
    assert isinstance(host, ThreadHost)
    fabric = LocalFabric()
    receiver = fabric.bind("ex0", 1, "plan", Ping)

    assert not host.wait([receiver], 0.0)
    fabric.connect(receiver.address).send(Ping(1))
    assert host.wait([receiver], 0.0)
    fabric.close()
    host.close()


async def test_an_async_host_hands_events_over_on_its_loop() -> None:
    host, uplink, actor = made(AsyncHost)
    from_another_thread(host, UP, Ping(5), Stop())
    assert [] == actor.heard
    await asyncio.sleep(0)

    assert [UP, "stop"] == actor.heard
    assert {threading.get_ident()} == actor.threads
    assert [Pong(5, "ex0")] == uplink.said
    assert host.is_stopping
    host.close()


async def test_words_to_an_actor_that_has_ended_are_dropped() -> None:
    host, _, actor = made(AsyncHost)
    host.deliver(DOWN)
    host.close()
    await asyncio.sleep(0)

    assert [] == actor.heard


async def test_an_async_host_asks_for_health_and_gets_its_own_answer() -> None:
    host, uplink, _ = made(AsyncHost)
    asking = asyncio.create_task(host.health())
    await asyncio.sleep(0)
    from_another_thread(host, HealthReply(99, "dead", "stopped", [], []), REPLY)

    assert REPLY == await asking
    assert [HealthQuery(1, False)] == uplink.said
    host.close()


async def test_health_without_an_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epicycle.actors.host.HEALTH_DEADLINE_S", 0.001)
    host, _, _ = made(AsyncHost)

    with pytest.raises(TimeoutError):
        await host.health()
    from_another_thread(host, REPLY)
    await asyncio.sleep(0)
    host.close()


def test_ready_drained_and_fatal_are_said_with_the_epoch() -> None:
    host, uplink, _ = made(ThreadHost)
    host.ready([Endpoint("plan", "local:x")])
    host.drained()
    with pytest.raises(ActorLeft):
        host.fatal("no_room", "engine.slots is 99")

    expected = [
        Ready("ex0", 2, [Endpoint("plan", "local:x")]),
        Drained("ex0", 2),
        Fatal("ex0", 2, "no_room", "engine.slots is 99"),
    ]
    assert expected == uplink.said
    assert "failed" == host.beat().state
    host.close()


def test_a_beat_carries_the_actors_facts_and_when_its_loop_last_turned() -> None:
    host, _, actor = made(ThreadHost)
    loading = host.beat()
    host.ready([])
    actor.facts.counters = {"ticks_total": 4.0}
    beat = host.beat()

    assert ("loading", 0.0) == (loading.state, loading.counters[LOOP_LAG])
    assert ("ready", 3, 1, 4.0) == (beat.state, beat.progress, beat.pending, beat.counters["ticks_total"])
    host.close()


def test_facts_that_change_under_the_read_do_not_stop_the_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, actor = made(ThreadHost)
    before = host.beat()

    def torn() -> BeatFacts:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(actor, "beat_facts", torn)

    assert before.progress == host.beat().progress
    host.close()


def test_words_before_the_actor_exists_are_harmless() -> None:
    uplink = Uplink()
    host = ThreadHost("ex0", 1, Config(), LocalFabric(), uplink)
    host.deliver(Stop())
    host.pump_events()

    assert host.is_stopping
    host.close()
