"""Ticks launched ahead: same bits, accounts that catch up, inert rows, and slots that are free only when they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from epicycle.engine import flight
from epicycle.engine.engine import Engine
from epicycle.engine.errors import TickError
from epicycle.transport.wire.columns import I32, pack, unpack_list
from epicycle.transport.wire.plan import StepReport
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.late_tick import late_pump
from tests.fakes.serving import Ask, Outcome, Serving, serve_all, tiny_engine, tiny_folder

GREEDY = Sampling(max_tokens=8, temperature=0.0, logprobs=1)
STOPPED = Sampling(max_tokens=20, temperature=0.0, stop_ids=pack(I32, list(range(0, 61, 3))))
EARLY = LoopBounds(min_loops=1, exit_threshold=0.55)
PROMPT = [5, 9, 33, 2, 41, 17, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "ouro")


def engine_of(folder: Path, ahead: int) -> Engine:
    return tiny_engine(folder, tick="device", run_ahead_ticks=ahead)


def asks(loops: tuple[LoopBounds, ...] = (LoopBounds(), EARLY)) -> list[Ask]:
    return [
        Ask([(7 * number + 3 * place) % 61 for place in range(3 + 4 * number)], sampling, loops[number % len(loops)])
        for number, sampling in enumerate([GREEDY, STOPPED] * 4)
    ]


def serve_late(engine: Engine, all_asks: list[Ask], delay: int) -> tuple[list[Outcome], Serving]:
    serving = Serving(engine, late_pump(engine, delay)[0])
    rids = [serving.submit(ask) for ask in all_asks]
    serving.run()
    while serving.pump.has_work():  # slots are free only after that
        serving.step()
    return [serving.outcomes[rid] for rid in rids], serving


def freed(reports: list[StepReport]) -> list[int]:
    return [slot for report in reports for slot in unpack_list(I32, report.freed_slots)]


class TestBits:
    @pytest.mark.parametrize("loops", [(LoopBounds(),), (EARLY,), (LoopBounds(), EARLY, LoopBounds(max_loops=2))])
    @pytest.mark.parametrize("ahead", [1, 2, 4])
    def test_however_late_and_far_ahead(self, folder: Path, ahead: int, loops: tuple[LoopBounds, ...]) -> None:
        expected = [outcome.bits for outcome in serve_all(tiny_engine(folder), asks(loops))]
        late, serving = serve_late(engine_of(folder, ahead), asks(loops), delay=3)
        assert expected == [outcome.bits for outcome in late]
        assert not serving.held

    def test_a_lease_that_grows_late(self, folder: Path) -> None:
        [expected] = serve_all(tiny_engine(folder), [Ask(PROMPT, GREEDY, EARLY)])
        engine = engine_of(folder, 3)
        serving = Serving(engine, late_pump(engine, 3)[0])
        rid = serving.submit(Ask(PROMPT, GREEDY, EARLY, limit_tokens=9))
        for _ in range(60):
            serving.step()
        assert 3 == len(serving.outcomes[rid].tokens)
        assert 1 == serving.pump.counters.starved_latency
        serving.grow(rid, 14)
        serving.run()
        assert expected.bits == serving.outcomes[rid].bits


class TestAccounts:
    def test_counters_are_those_of_a_pump_that_sees_at_once(self, folder: Path) -> None:
        """Whatever a row that had ended might have computed isn't counted."""
        one = [Ask(PROMPT, STOPPED, EARLY)]
        eager = Serving(tiny_engine(folder))
        eager.submit(one[0])
        eager.run()
        _, late = serve_late(engine_of(folder, 4), one, delay=2)
        names = ("decode_row_loops", "prompt_row_loops", "rows_in_ticks", "loops_saved", "generated_tokens")
        expected, actual = asdict(eager.pump.counters), asdict(late.pump.counters)
        assert [expected[name] for name in names] == [actual[name] for name in names]

    def test_rows_of_fixed_depth_are_not_launched_beyond_their_last_token(self, folder: Path) -> None:
        engine = engine_of(folder, 4)
        pump, tick = late_pump(engine, 3)
        serving = Serving(engine, pump)
        serving.submit(Ask(PROMPT, GREEDY))
        serving.run()
        assert 4 + 7 == len(tick.launched)  # a prompt's loops, and a whole token for each output but the first
        assert {1, 4} == {work.loops for work in tick.launched}


class TestSlots:
    def test_an_evicted_slot_is_free_once_its_last_tick_is_complete(self, folder: Path) -> None:
        engine = engine_of(folder, 3)
        serving = Serving(engine, late_pump(engine, 8)[0])
        rid = serving.submit(Ask(PROMPT, Sampling(max_tokens=30, temperature=0.0), EARLY))
        while not serving.outcomes[rid].tokens:
            serving.step()
        serving.pump.tick()
        serving.evict(rid)
        serving.collect()
        assert "cancelled" == serving.outcomes[rid].reason
        assert [] == freed(serving.reports)
        while not freed(serving.reports):
            assert serving.pump.has_work()
            serving.pump.tick()
            serving.collect()
        assert [0] == freed(serving.reports)

    def test_a_slot_is_given_away_while_ticks_of_its_last_owner_are_on_their_way(self, folder: Path) -> None:
        [expected] = serve_all(tiny_engine(folder, slots=1), [Ask(PROMPT, GREEDY)])
        engine = tiny_engine(folder, tick="device", run_ahead_ticks=4, slots=1)
        serving = Serving(engine, late_pump(engine, 6)[0])
        first = serving.submit(Ask([1, 2, 3], Sampling(max_tokens=30, temperature=0.0), EARLY))
        second = serving.submit(Ask(PROMPT, GREEDY))
        while not serving.outcomes[first].tokens:
            serving.step()
        serving.evict(first)
        serving.run()
        assert expected.bits == serving.outcomes[second].bits

    def test_after_a_reset_late_results_are_nobody_s(self, folder: Path) -> None:
        engine = engine_of(folder, 4)
        serving = Serving(engine, late_pump(engine, 6)[0])
        rid = serving.submit(Ask(PROMPT, GREEDY, EARLY))
        while not serving.outcomes[rid].tokens:
            serving.step()
        serving.pump.tick()
        serving.pump.reset(1)
        report = serving.pump.collect().report
        assert report is not None
        assert (1, b"", b"") == (report.control_epoch, report.slots, report.freed_slots)
        while serving.pump.has_work():
            serving.pump.tick()
            output = serving.pump.collect()
            assert {} == output.to_gateways


def test_a_tick_that_never_completes_ends_the_pump(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "LOST_TICK_S", 0.01)
    monkeypatch.setattr(flight, "WAIT_S", 0.004)
    engine = engine_of(folder, 1)
    serving = Serving(engine, late_pump(engine, 1 << 60)[0])
    serving.submit(Ask(PROMPT, GREEDY))
    with pytest.raises(TickError, match="not complete") as caught:
        serving.run(200)
    assert "lost_tick" == caught.value.code
