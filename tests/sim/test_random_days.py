"""Days of random traffic, cancels, slow links and deaths: every request ends once, says what it should, and leaves
nothing behind. A day is a seed, so a bad one can be lived again."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from epicycle.actors.executor import KINDS
from epicycle.transport.wire.transfer import TransferFailure
from tests.fakes.split_pump import STAGES, Hub, split_engine
from tests.sim.world import World, expected_tokens, make_config

RESERVATIONS = ("lifetime", "incremental")
ENDS = {"length", "cancelled", "deadline", "timeout", "overloaded", "engine_lost", "not_ready"}


class Day:
    """Random events on one world; `ask` remembers (rid, prompt tokens) of everything asked."""

    def __init__(
        self, seed: int, *, host_pages: int = 64, host_prefix_pages: int = 0, hub: Hub | None = None, **scheduler: Any
    ) -> None:
        self.hub = hub or Hub()
        self.dice = random.Random(seed)
        config = make_config(pages=24, slots=5, chunk_tokens=16, max_waiting=12, max_bypasses=2, **scheduler)
        executor = msgspec.structs.replace(
            config.executor, mock_host_pages=host_pages, mock_host_prefix_pages=host_prefix_pages
        )
        self.world = World(msgspec.structs.replace(config, executor=executor), gateways=2)
        self.asked: list[tuple[int, int]] = []
        self.executor_epoch = len(self.world.executors)

    def ask(self) -> None:
        prompt, gateway = self.dice.randint(1, 120), self.dice.choice(self.world.gateways)
        rid = gateway.submit(
            prompt=prompt,
            max_tokens=self.dice.randint(0, 150),
            priority=self.dice.randint(0, 2),
            deadline_ms=self.dice.choice((0, 0, 0, 2000)),
            logprobs=self.dice.choice((-1, -1, 0, 2)),
            session_id=self.dice.choice(("", "", "a", "b")),
        )
        self.asked.append((rid, prompt))

    def cancel(self) -> None:
        if self.asked:
            rid, _ = self.dice.choice(self.asked[-20:])
            self.world.gateways[rid >> 56].cancel(rid)

    def jam(self) -> None:
        """Block one link, or lift every blockade."""
        world = self.world
        if world.fabric.blocked:
            world.fabric.blocked.clear()
            return
        links = [
            *(host.endpoints[0].address for host in world.executor_hosts.values()),
            world.control_host.endpoints[2].address,
            *(gateway.tokens.address for gateway in world.gateways),
            *(gateway.verdicts.address for gateway in world.gateways),
        ]
        world.fabric.blocked.add(self.dice.choice(links))

    def wait(self) -> None:
        self.world.clock.advance(self.dice.random())
        self.world.step(self.dice.randint(1, 30))

    def lose_executor(self) -> None:
        name = self.dice.choice(tuple(self.world.executors))
        self.hub.dead.add(self.world.executor_hosts[name].epoch)
        self.world.kill_executor(name)
        self.world.step(self.dice.randint(0, 3))
        self.executor_epoch += 1
        self.world.start_executor(self.executor_epoch, name)

    def hold(self) -> None:
        """Stop transfers at some stage, or let them go on."""
        self.hub.held = self.dice.choice(("", "", *STAGES))

    def fail_transfers(self) -> None:
        """Some executor reports the latest transfers as failed."""
        open_ones = [number for number, progress in self.hub.transfers.items() if "commit" not in progress.done]
        failures = [TransferFailure(number, "transfer_error", "by the test") for number in open_ones[-2:]]
        self.hub.to_fail[self.dice.choice(tuple(self.world.executor_hosts.values())).epoch] = failures

    def close(self) -> None:
        """Let everything end, then check every account."""
        world = self.world
        world.fabric.blocked.clear()
        self.hub.held = ""
        for rid, prompt in self.asked:
            [end] = world.finish(rid)
            assert end in ENDS
            heard = world.heard(rid)
            assert expected_tokens(prompt, len(heard.tokens)) == heard.tokens
        world.assert_empty()
        waiting = [value for key, value in world.control.beat_facts().counters.items() if 'reason="prefill"' in key]
        assert not any(waiting)
        is_calm = self.executor_epoch == len(world.executors)
        assert 0 == world.counter('stale_messages_total{actor="control"}') or not is_calm


@pytest.mark.parametrize("reservation", RESERVATIONS)
@pytest.mark.parametrize("seed", range(12))
def test_busy_day(seed: int, reservation: str) -> None:
    day = Day(seed, reservation=reservation, low_water_tokens=6, grow_tokens=12, prefix_cache=seed % 3 > 0)
    for _ in range(120):
        day.dice.choice((day.ask, day.ask, day.ask, day.cancel, day.wait, day.wait, day.jam))()
    day.close()


@pytest.mark.parametrize("seed", range(6))
def test_crowded_day_on_which_rows_leave_and_come_back(seed: int) -> None:
    """Every other day host memory holds a row or two."""
    prefix = {"prefix_cache": seed % 3 > 0, "host_prefix_pages": (0, 5, 20)[seed % 3]}
    day = Day(200 + seed, host_pages=(8, 64)[seed % 2], low_water_tokens=6, grow_tokens=6, **prefix)
    for _ in range(160):
        day.dice.choice((day.ask, day.ask, day.ask, day.ask, day.cancel, day.wait, day.jam))()
    assert day.world.counter("preemptions_total") > 0
    day.close()


@pytest.mark.parametrize("seed", range(8))
def test_day_on_which_executors_die(seed: int) -> None:
    reservation = RESERVATIONS[seed % 2]
    day = Day(100 + seed, reservation=reservation, low_water_tokens=6, grow_tokens=12, prefix_cache=seed % 4 > 1)
    for turn in range(120):
        if turn % 40 == 39:
            day.lose_executor()
        day.dice.choice((day.ask, day.ask, day.cancel, day.wait, day.jam))()
    day.close()


@pytest.mark.parametrize("seed", range(8))
def test_day_of_replicas_that_die(seed: int) -> None:
    reservation = RESERVATIONS[seed % 2]
    day = Day(300 + seed, replicas=3, reservation=reservation, low_water_tokens=6, grow_tokens=12, prefix_cache=True)
    for turn in range(160):
        if turn % 40 == 39:
            day.lose_executor()
        day.dice.choice((day.ask, day.ask, day.ask, day.cancel, day.wait, day.jam))()
    day.close()


@pytest.mark.parametrize("seed", range(12))
def test_day_of_a_split_whose_executors_die(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(KINDS, "mock", split_engine(hub))
    reservation = RESERVATIONS[seed % 2]
    day = Day(
        400 + seed,
        hub=hub,
        split=(2, 2),
        reservation=reservation,
        low_water_tokens=6,
        grow_tokens=12,
        prefix_cache=True,
    )
    for turn in range(160):
        if turn % 40 == 39:
            day.lose_executor()
        events = (day.ask, day.ask, day.ask, day.cancel, day.wait, day.wait, day.jam, day.hold, day.fail_transfers)
        day.dice.choice(events)()
    day.close()
