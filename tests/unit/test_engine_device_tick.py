"""The device tick gives the eager tick's bits, and the pump's accounts stay right when results come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.engine.engine import Engine
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, Serving, serve_all, tiny_engine, tiny_folder
from tests.fakes.tiny_models import CONFIGS

GREEDY = Sampling(max_tokens=8, temperature=0.0)
REPORTED = Sampling(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2)
DRAWN = Sampling(max_tokens=9, temperature=0.9, top_p=0.9, top_k=20, seed=5, logprobs=1, presence_penalty=0.5)
HELD = Sampling(
    max_tokens=7,
    temperature=0.0,
    min_tokens=3,
    stop_ids=pack(I32, list(range(0, 61, 2))),
    logit_bias_ids=pack(I32, [3, 5]),
    logit_bias_values=pack(F32, [2.0, -1.0]),
)
STOPPED = Sampling(max_tokens=12, temperature=0.0, stop_ids=pack(I32, list(range(0, 61, 3))))
BOUNDS = (LoopBounds(), LoopBounds(min_loops=1, exit_threshold=0.55), LoopBounds(max_loops=2, exit_threshold=0.3))


def mixed(count: int = 9) -> list[Ask]:
    samplings = (GREEDY, REPORTED, DRAWN, HELD, STOPPED)
    return [
        Ask(
            [(7 * number + 3 * place) % 61 for place in range(2 + 3 * number)],
            samplings[number % 5],
            BOUNDS[number % 3],
            noise_seed=number,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), request.param)


def bits(engine: Engine, asks: list[Ask]) -> list[tuple[object, ...]]:
    return [outcome.bits for outcome in serve_all(engine, asks)]


class TestBits:
    def test_mixed_requests_get_the_eager_tick_s_bits(self, folder: Path) -> None:
        eager, device = tiny_engine(folder, tick="eager"), tiny_engine(folder, tick="device")
        assert bits(eager, mixed()) == bits(device, mixed())

    def test_rows_of_one_depth_run_whole_tokens(self, folder: Path) -> None:
        asks = [Ask(list(range(3, 9 + number)), GREEDY) for number in range(4)]
        eager, device = tiny_engine(folder, tick="eager"), tiny_engine(folder, tick="device")
        assert bits(eager, asks) == bits(device, asks)
        assert device.run_counters is not None
        assert device.run_counters.whole_tokens > 0

    @pytest.mark.parametrize("layout", ["shared", "budgeted:2"])
    def test_layouts_that_overwrite_planes(self, folder: Path, layout: str) -> None:
        asks = mixed(5)
        eager = tiny_engine(folder, tick="eager", kv_layout=layout)
        device = tiny_engine(folder, tick="device", kv_layout=layout)
        assert bits(eager, asks) == bits(device, asks)


def test_a_pump_left_in_the_middle_of_its_prompts_takes_nothing_from_the_next_one(folder: Path) -> None:
    asks = [Ask(list(range(3, 33)), GREEDY) for _ in range(4)]
    expected = bits(tiny_engine(folder, tick="device", prompt_chunk_tokens=8), asks)
    engine = tiny_engine(folder, tick="device", prompt_chunk_tokens=8)
    for _ in range(3):
        left = Serving(engine)
        for ask in asks:
            left.submit(ask)
        left.step()
    assert expected == bits(engine, asks)
