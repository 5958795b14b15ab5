"""The offline driver: what it admits, how leases grow, and holding a row after its first token."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.engine.engine import Engine
from epicycle.engine.slots import slot_bytes
from epicycle.kvstore.errors import KvError
from epicycle.tools.offline import Offline, Reply, Request
from epicycle.transport.wire.request import Sampling
from tests.fakes.serving import tiny_engine, tiny_folder

SMALL_POOL_PAGES = 10


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tiny_folder(tmp_path_factory.mktemp("m"), "ouro"), context_tokens=48)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Engine:
    """An engine whose pool holds few pages, poisoned as they change hands."""
    folder: Path = tiny_folder(tmp_path_factory.mktemp("s"), "ouro")
    room = SMALL_POOL_PAGES * engine.pool.facts.page_bytes + 3 * slot_bytes(engine.spec, 32, 4)
    return tiny_engine(folder, slots=3, context_tokens=32, kv_memory_bytes=room, poison=True)


def request(prompt: int, output: int, is_held: bool = False) -> Request:
    ids = [3 + (prompt * 7 + at) % 50 for at in range(prompt)]
    sampling = Sampling(max_tokens=output, temperature=0.0, logprobs=0)
    return Request(prompt=ids, sampling=sampling, is_held=is_held)


def bits(replies: list[Reply]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(reply.tokens, reply.exit_depths, reply.logprobs) for reply in replies]


REQUESTS = [request(5, 9), request(12, 6), request(1, 20)]


def test_leases_that_grow_give_the_same_bits(engine: Engine) -> None:
    whole = Offline(engine).run(REQUESTS)
    growing = Offline(engine, grow_tokens=1)
    assert bits(whole) == bits(growing.run(REQUESTS))
    assert 0 == growing.pool.ledger.used_pages
    assert 0 == growing.pump.counters.starved_pool


def test_growing_leases_hold_less_at_first(engine: Engine) -> None:
    whole, growing = Offline(engine), Offline(engine, grow_tokens=1)
    for offline in (whole, growing):
        offline.submit(request(5, 30))
        offline.step()
    assert whole.pool.ledger.used_pages > growing.pool.ledger.used_pages


@pytest.mark.parametrize("grow_tokens", [0, 3])
def test_what_does_not_fit_waits_and_all_of_it_runs(small: Engine, grow_tokens: int) -> None:
    offline = Offline(small, grow_tokens=grow_tokens)
    requests = [request(10 + number, 14) for number in range(4)]  # 6 or 7 pages each: one at a time
    for one in requests:
        offline.submit(one)
    peak = 0
    while offline.step():
        peak = max(peak, offline.running)
    ended = offline.drain_ended()
    assert 1 == peak
    assert [14] * 4 == [len(reply.tokens) for reply in ended]
    assert bits([Offline(small).run([one])[0] for one in requests]) == bits(ended)


def test_what_can_never_fit_is_refused(small: Engine) -> None:
    with pytest.raises(KvError):
        Offline(small).submit(request(20, 28))


def test_a_held_request_stops_after_its_first_token_until_it_is_released(engine: Engine) -> None:
    offline = Offline(engine)
    reply = offline.submit(request(5, 6, is_held=True))
    for _ in range(40):
        offline.step()
    assert 1 == len(reply.tokens)
    assert reply.end is None
    offline.release_held()
    while offline.step():
        pass
    assert bits(Offline(engine).run([request(5, 6)])) == bits([reply])


def test_ended_replies_are_drained_once(engine: Engine) -> None:
    offline = Offline(engine)
    replies = offline.run([request(3, 2)])
    assert replies == offline.drain_ended()
    assert [] == offline.drain_ended()


def test_nobody_is_preempted_while_more_than_half_of_all_are_on_their_way(engine: Engine) -> None:
    offline = Offline(engine)
    replies = [offline.submit(request(4, 20)) for _ in range(4)]
    while offline.running < 4:
        offline.step()
    for _ in range(9):
        offline.preempt(min)
    assert 3 == offline.preemptions
    while offline.step():
        pass
    assert bits(Offline(engine).run([request(4, 20)])) * 4 == bits(replies)
