"""Requests that end while their rows are on the way off the device, away, or on the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from epicycle.engine.engine import Engine
from epicycle.transport.wire.columns import I32, pack, unpack_list
from epicycle.transport.wire.plan import Drop, Evict, Resume
from epicycle.transport.wire.request import Sampling
from tests.fakes.late_mover import make_copies_late
from tests.fakes.late_tick import late_pump
from tests.fakes.serving import Ask, Serving, serve_all, tiny_engine, tiny_folder

PROMPT = [5, 9, 33, 2, 41, 17, 60]
ASK = Ask(PROMPT, Sampling(max_tokens=8, temperature=0.0, logprobs=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "ouro")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return tiny_engine(folder, poison=True)


class Tray(Serving):
    """Takes its one request off and puts it back by hand; `saved` are (slot, positions) as reported."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rid = self.submit(ASK)
        while len(self.outcomes[self.rid].tokens) < 3:
            self.step()

    @property
    def saved(self) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for report in self.reports:
            pairs += zip(unpack_list(I32, report.saved_slots), unpack_list(I32, report.saved_tokens), strict=True)
        return pairs

    @property
    def freed(self) -> list[int]:
        return [slot for report in self.reports for slot in unpack_list(I32, report.freed_slots)]

    def park(self) -> None:
        slot, pages = self.held[self.rid]
        host_pages = pack(I32, range(len(pages)))
        self.plan(evicts=[Evict(slot, self.gens[slot], "preempt", host_pages=host_pages)])

    def save(self) -> None:
        self.park()
        while not self.saved:
            self.step()

    def bring_back(self) -> None:
        """Into another slot and other pages."""
        slot, pages = self.slots.pop(), self.take_pages(4)
        self.gens[slot] += 1
        self.held[self.rid] = slot, pages
        live = -(-self.saved[-1][1] // self.engine.pool.page_tokens)
        resume = Resume(self.rid, slot, self.gens[slot], pack(I32, pages), 14, host_pages=pack(I32, range(live)))
        self.plan(resumes=[resume])


def test_a_saved_row_keeps_nothing_on_the_device_and_goes_on_elsewhere(engine: Engine) -> None:
    [expected] = serve_all(engine, [ASK])
    tray = Tray(engine)
    tray.save()
    assert [(0, 9)] == tray.saved
    assert not tray.pump.has_work()
    engine.pool.k.fill_(float("nan"))
    engine.pool.k[-engine.pool.facts.slots_per_page :].zero_()  # the zero page stays
    tray.bring_back()
    tray.run()
    assert expected.bits == tray.outcomes[tray.rid].bits
    assert [5] == tray.freed


def test_a_saved_request_that_is_dropped_says_so(engine: Engine) -> None:
    tray = Tray(engine)
    tray.save()
    tray.plan(drops=[Drop(tray.rid, "deadline", "too late")])
    tray.collect()
    fin = tray.outcomes[tray.rid].fin
    assert fin is not None
    assert ("deadline", 3, "too late") == (fin.reason, fin.tokens, fin.message)
    tray.plan(drops=[Drop(tray.rid)])
    assert 1 == tray.pump.counters.stale_messages


def test_a_row_evicted_on_its_way_out_ends_and_is_not_saved(engine: Engine) -> None:
    make_copies_late(engine, 5)
    tray = Tray(engine)
    tray.park()
    tray.step()
    tray.evict(tray.rid)
    tray.run()
    while tray.pump.has_work():
        tray.step()
    assert ("cancelled", [], [0]) == (tray.outcomes[tray.rid].reason, tray.saved, tray.freed)


def test_a_row_evicted_on_its_way_back_keeps_its_pages_until_they_have_arrived(engine: Engine) -> None:
    mover = make_copies_late(engine, 5)
    tray = Tray(engine)
    tray.save()
    tray.bring_back()
    tray.evict(tray.rid)
    tray.collect()
    assert "cancelled" == tray.outcomes[tray.rid].reason
    assert [] == tray.freed
    while not tray.freed:
        assert tray.pump.has_work()
        tray.step()
    assert mover.loaded_pages == 3
    assert [5] == tray.freed


def test_a_row_taken_again_on_its_way_back_is_saved_again(engine: Engine) -> None:
    [expected] = serve_all(engine, [ASK])
    make_copies_late(engine, 3)
    tray = Tray(engine)
    tray.save()
    tray.bring_back()
    tray.park()
    while len(tray.saved) < 2:
        tray.step()
    assert [(0, 9), (5, 9)] == tray.saved
    tray.bring_back()
    tray.run()
    assert expected.bits == tray.outcomes[tray.rid].bits


def test_a_reset_forgets_saved_rows(engine: Engine) -> None:
    tray = Tray(engine)
    tray.save()
    tray.pump.reset(1)
    tray.bring_back()
    assert 1 == tray.pump.counters.stale_messages
    assert not tray.pump._residents


def test_a_token_that_ends_the_request_comes_before_the_save(folder: Path) -> None:
    """It was on its way when the row was taken: the request ends, and there is nothing to save."""
    engine = tiny_engine(folder, tick="device", run_ahead_ticks=3)
    serving = Serving(engine, late_pump(engine, 3)[0])
    rid = serving.submit(Ask(PROMPT, Sampling(max_tokens=2, temperature=0.0)))
    while not serving.outcomes[rid].tokens:
        serving.step()
    serving.pump.tick()
    slot, pages = serving.held[rid]
    serving.plan(evicts=[Evict(slot, 1, "preempt", host_pages=pack(I32, range(len(pages))))])
    serving.run()
    while serving.pump.has_work():
        serving.step()
    assert "length" == serving.outcomes[rid].reason
    assert not any(report.saved_slots for report in serving.reports)
    assert [slot] == [slot for report in serving.reports for slot in unpack_list(I32, report.freed_slots)]


@pytest.mark.parametrize("tick", ["eager", "device"])
def test_prompt_pages_come_back_from_the_host_as_they_were(folder: Path, tick: str) -> None:
    """Spilled in the plan that gives them to somebody else, and loaded into other pages later."""
    engine = tiny_engine(folder, tick=tick, host_kv_bytes=1, host_prefix_bytes=1 << 20)
    ask = Ask([(5 * place) % 61 for place in range(14)], ASK.sampling)
    mover = make_copies_late(engine, 4)
    serving = Serving(engine, late_pump(engine, 2)[0] if tick == "device" else None)
    first = serving.submit(ask)
    serving.run()
    while serving.held:
        serving.step()
    table = serving.tables[first]
    serving.plan(spilled_pages=pack(I32, table[:3]), spilled_to=pack(I32, [4, 2, 6]))
    serving.submit(Ask([1, 2, 3], Sampling(max_tokens=12, temperature=0.0)))  # takes the pages
    serving.run()
    assert set(table[:3]) & set(serving.tables[first + 1])
    serving.pages = [page for page in serving.pages if page not in table] + table
    again = serving.submit(replace(ask, parts={"prefix_tokens": 12, "host_pages": pack(I32, [4, 2, 6])}))
    serving.run()
    assert serving.outcomes[first].bits == serving.outcomes[again].bits
    assert 12 == serving.outcomes[again].cached_tokens
    assert 3 == mover.loaded_pages
    assert 3 == max(report.spilled_pages for report in serving.reports)
