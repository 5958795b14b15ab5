"""The mock pump keeps the pump's contract: tests of everything above it lean on that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epicycle.actors.mock_model import mock_capabilities, mock_key, mock_token
from epicycle.actors.mock_pump import MockEngine, MockPump
from epicycle.transport.wire.columns import I32, U16, pack, unpack, unpack_list
from epicycle.transport.wire.output import POOL_WARNING, Fin, TokenBatch
from epicycle.transport.wire.plan import Evict, Grow, Join, Plan
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.sim.world import make_config

FACTS = mock_capabilities(make_config(chunk_tokens=16))


def join(slot: int = 0, gen: int = 1, prompt: Sequence[int] = (5, 6), pages: int = 4, **changes: Any) -> Join:
    sampling = changes.pop("sampling", Sampling(max_tokens=changes.pop("max_tokens", 4)))
    return Join(
        rid=100 + slot,
        gateway=0,
        slot=slot,
        gen=gen,
        prompt=pack(I32, prompt),
        pages=pack(I32, range(pages)),
        limit_tokens=changes.pop("limit_tokens", pages * FACTS.page_tokens),
        sampling=sampling,
        loops=changes.pop("loops", LoopBounds()),
        **changes,
    )


def run(pump: MockPump, plan: Plan | None = None, ticks: int = 100) -> tuple[list[int], list[Fin]]:
    """Apply, tick until idle; tokens and fins of gateway 0."""
    if plan is not None:
        pump.apply(plan)
    tokens: list[int] = []
    fins: list[Fin] = []
    for _ in range(ticks):
        if not pump.has_work():
            break
        pump.tick()
        for message in pump.collect().to_gateways.get(0, []):
            match message:
                case TokenBatch():
                    tokens += unpack_list(I32, message.tokens)
                case Fin():
                    fins.append(message)
    return tokens, fins


def said(prompt: Sequence[int], count: int) -> list[int]:
    return [mock_token(mock_key(unpack(I32, pack(I32, prompt))), index) for index in range(count)]


def test_prompt_takes_its_chunks_times_loops_ticks() -> None:
    pump = MockPump(FACTS, 1)
    run(pump, Plan(1, 1, joins=[join(prompt=range(33), max_tokens=1)]))
    assert 3 * FACTS.loops == pump.counters.ticks


def test_one_token_per_stream_and_tick() -> None:
    pump = MockPump(FACTS, 1)
    tokens, [fin] = run(pump, Plan(1, 1, joins=[join(max_tokens=6)]))
    assert said((5, 6), 6) == tokens
    assert FACTS.loops + 5 == pump.counters.ticks
    assert ("length", 6) == (fin.reason, fin.tokens)


def test_stop_id_ends_a_row_and_stays_in_the_output() -> None:
    words = said((5, 6), 20)
    stop = words[3]
    first = words.index(stop)
    sampling = Sampling(max_tokens=20, stop_ids=pack(I32, [stop]))
    tokens, [fin] = run(MockPump(FACTS, 1), Plan(1, 1, joins=[join(sampling=sampling)]))
    assert (words[: first + 1], "stop") == (tokens, fin.reason)


def test_zero_tokens_score_the_prompt_only() -> None:
    tokens, [fin] = run(MockPump(FACTS, 1), Plan(1, 1, joins=[join(max_tokens=0)]))
    assert ([], "length", 0) == (tokens, fin.reason, fin.tokens)


def test_row_waits_at_its_limit_and_goes_on_when_it_grows() -> None:
    pump = MockPump(FACTS, 1)
    tokens, fins = run(pump, Plan(1, 1, joins=[join(prompt=range(14), pages=1, max_tokens=10)]))
    assert (3, []) == (len(tokens), fins)  # positions 14 and 15 fed back two of them
    assert not pump.has_work()
    assert 1 == pump.counters.starved_latency
    more, fins = run(pump, Plan(1, 2, grows=[Grow(0, 1, pack(I32, [9]), 32)]))
    assert (7, ["length"]) == (len(more), [fin.reason for fin in fins])


def test_final_lease_ends_its_row_with_a_warning() -> None:
    pump = MockPump(FACTS, 1)
    run(pump, Plan(1, 1, joins=[join(prompt=range(14), pages=1, max_tokens=10)]))
    _, [fin] = run(pump, Plan(1, 2, grows=[Grow(0, 1, b"", 16, is_final=True)]))
    assert ("length", 3, POOL_WARNING) == (fin.reason, fin.tokens, fin.warning)
    assert 1 == pump.counters.starved_pool


def test_plan_of_another_epoch_and_messages_about_strangers_are_counted_and_dropped() -> None:
    pump = MockPump(FACTS, 1)
    pump.apply(Plan(2, 1, joins=[join()]))
    pump.apply(Plan(1, 1, evicts=[Evict(3, 1)], grows=[Grow(2, 1, b"", 16)], joins=[join(), join(gen=2)]))
    assert 4 == pump.counters.stale_messages


def test_evicted_row_reports_its_slot_freed() -> None:
    pump = MockPump(FACTS, 1)
    pump.apply(Plan(1, 1, joins=[join()]))
    pump.tick()
    pump.collect()
    pump.apply(Plan(1, 2, evicts=[Evict(0, 1, "deadline", "too late")]))
    output = pump.collect()
    assert output.report is not None
    assert ([0], [1], 2) == (
        unpack_list(I32, output.report.freed_slots),
        unpack_list(I32, output.report.freed_gens),
        output.report.plan_seq,
    )
    [fin] = output.to_gateways[0]
    assert isinstance(fin, Fin)
    assert ("deadline", "too late") == (fin.reason, fin.message)


def test_reset_drops_rows_without_fin_and_reports_nothing_but_the_control_epoch() -> None:
    pump = MockPump(FACTS, 1)
    pump.apply(Plan(1, 1, joins=[join()]))
    pump.tick()
    pump.reset(5)
    output = pump.collect()
    assert output.report is not None
    assert (5, b"", b"") == (output.report.control_epoch, output.report.slots, output.report.freed_slots)
    assert {} == output.to_gateways
    assert not pump.has_work()


def test_trace_prescribes_the_depths() -> None:
    pump = MockPump(FACTS, 1)
    trace = LoopBounds(exit_trace=pack(U16, [4, 1, 3]))
    pump.apply(Plan(1, 1, joins=[join(max_tokens=3, loops=trace)]))
    depths: list[int] = []
    while pump.has_work():
        pump.tick()
        for message in pump.collect().to_gateways.get(0, []):
            if isinstance(message, TokenBatch):
                depths += unpack_list(U16, message.exit_depths)
    assert [4, 1, 3] == depths


def test_mock_engine_answers_its_canary() -> None:
    engine = MockEngine(make_config())
    engine.canary()
    assert 64 == engine.capabilities().total_pages
