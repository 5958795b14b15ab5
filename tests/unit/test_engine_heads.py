"""A request whose prompt is in its pages starts at the LM head and goes on as if it had computed the prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from epicycle.engine.engine import Engine
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.late_tick import late_pump
from tests.fakes.serving import Ask, Outcome, Serving, tiny_engine, tiny_folder
from tests.fakes.tiny_models import CONFIGS

GREEDY = Sampling(max_tokens=8, temperature=0.0, logprobs=2)
PLAIN = Sampling(max_tokens=8, temperature=0.0)
DRAWN = Sampling(max_tokens=9, temperature=0.9, top_p=0.9, seed=5, logprobs=1, presence_penalty=0.5)
ONE = Sampling(max_tokens=1, temperature=0.0, logprobs=0)
HELD = Sampling(max_tokens=7, temperature=0.0, min_tokens=3, stop_ids=pack(I32, list(range(0, 61, 2))))
EARLY = LoopBounds(min_loops=1, exit_threshold=0.55)
LAYOUTS = ("last_exited", "shared", "budgeted:2")


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), request.param)


def prompt_of(length: int) -> list[int]:
    return [(7 * place + length) % 61 for place in range(length)]


def asks() -> list[Ask]:
    samplings = (GREEDY, DRAWN, PLAIN, ONE, HELD)
    loops = (LoopBounds(exit_threshold=0.02), EARLY, LoopBounds())
    return [
        Ask(prompt_of(length), samplings[number % 5], loops[number % 3], noise_seed=number)
        for number, length in enumerate((1, 3, 4, 5, 16, 17))
    ]


def kept_then_repeated(serving: Serving) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of requests that keep their heads, and of the same ones started from those heads on the same pages.

    Nothing is poisoned here: a last page that isn't full is nobody's once its request has ended.
    """
    first = [serving.submit(replace(ask, parts={"head_to": row})) for row, ask in enumerate(asks())]
    serving.run()
    while serving.pump.has_work():
        serving.step()
    second = []
    for row, (ask, rid) in enumerate(zip(asks(), first, strict=True)):
        table = serving.tables[rid]
        serving.pages = table + [page for page in serving.pages if page not in table]
        second.append(
            serving.submit(replace(ask, parts={"head_from": row, "prefix_tokens": len(ask.prompt)})),
        )
        serving.admit()
    serving.run()
    return [serving.outcomes[rid] for rid in first], [serving.outcomes[rid] for rid in second]


class TestBits:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("tick", ["eager", "device"])
    def test_whatever_the_layout_and_the_tick(self, folder: Path, tick: str, layout: str) -> None:
        serving = Serving(tiny_engine(folder, tick=tick, kv_layout=layout, poison=False))
        first, second = kept_then_repeated(serving)
        assert [outcome.bits for outcome in first] == [outcome.bits for outcome in second]
        assert [len(ask.prompt) for ask in asks()] == [outcome.cached_tokens for outcome in second]

    def test_with_ticks_ahead(self, folder: Path) -> None:
        engine = tiny_engine(folder, tick="device", run_ahead_ticks=3, poison=False)
        first, second = kept_then_repeated(Serving(engine, late_pump(engine, 4)[0]))
        assert [outcome.bits for outcome in first] == [outcome.bits for outcome in second]

    def test_a_rule_that_reads_the_previous_state(self, tmp_path: Path) -> None:
        engine = tiny_engine(tiny_folder(tmp_path, "ouro"), exit_rule="random_lookahead", poison=False)
        first, second = kept_then_repeated(Serving(engine))
        assert [outcome.bits for outcome in first] == [outcome.bits for outcome in second]
        assert {1, 2, 3} & {depth for outcome in second for depth in outcome.depths}


def test_no_prompt_row_runs(folder: Path) -> None:
    engine: Engine = tiny_engine(folder, poison=False)
    serving = Serving(engine)
    kept_then_repeated(serving)
    computed = engine.spec.loops * sum(len(ask.prompt) for ask in asks())
    assert computed == serving.pump.counters.prompt_row_loops


def test_an_evicted_row_never_starts(folder: Path) -> None:
    serving = Serving(tiny_engine(folder))
    rid = serving.submit(Ask([1, 2, 3], GREEDY, parts={"head_from": 0, "prefix_tokens": 3}))
    serving.admit()
    serving.evict(rid)
    serving.run()
    assert ([], "cancelled") == (serving.outcomes[rid].tokens, serving.outcomes[rid].reason)
    assert not serving.held
