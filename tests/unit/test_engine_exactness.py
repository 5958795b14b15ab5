"""A request's tokens, exit depths and logprobs are the same bits whatever shares its ticks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from epicycle.engine.engine import Engine
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, Outcome, Serving, serve_all, serve_alone, tiny_engine, tiny_folder

MODELS = ("ouro", "huginn_raven", "nanbeige")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: tiny_folder(parent, name) for name in MODELS}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, Engine]:
    return {name: tiny_engine(folders[name]) for name in MODELS}


def mixed_asks(count: int, seed: int = 0, lengths: tuple[int, ...] = (1, 3, 9, 17, 38)) -> list[Ask]:
    """Requests of many lengths, bounds and samplers."""
    rng = random.Random(seed)
    asks = []
    for number in range(count):
        sampling = Sampling(
            max_tokens=rng.randint(1, 7),
            temperature=rng.choice((0.0, 0.8, 1.3)),
            top_k=rng.choice((0, 0, 7)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            seed=rng.getrandbits(64),
            logprobs=rng.choice((0, 2, 5)),
            prompt_logprobs=rng.choice((-1, 0, 3)),
            stop_ids=pack(I32, [2]),
        )
        loops = LoopBounds(min_loops=rng.randint(1, 2), exit_threshold=rng.choice((0.3, 0.55, 0.8, 1.0)))
        prompt = [rng.randrange(61) for _ in range(rng.choice(lengths))]
        asks.append(Ask(prompt, sampling, loops, noise_seed=number % 3))
    return asks


def all_bits(outcomes: list[Outcome]) -> list[tuple[object, ...]]:
    return [outcome.bits for outcome in outcomes]


@pytest.mark.parametrize("name", MODELS)
class TestSameBits:
    def test_alone_and_together(self, engines: dict[str, Engine], name: str) -> None:
        asks = mixed_asks(9)
        assert all_bits(serve_alone(engines[name], asks)) == all_bits(serve_all(engines[name], asks))

    def test_whatever_the_chunk(self, engines: dict[str, Engine], name: str) -> None:
        asks = mixed_asks(6, seed=1)
        expected = all_bits(serve_all(engines[name], asks, chunk_tokens=40))
        assert expected == all_bits(serve_all(engines[name], asks, chunk_tokens=3))
        assert expected == all_bits(serve_all(engines[name], asks, chunk_tokens=16))

    def test_whatever_the_arrival(self, engines: dict[str, Engine], name: str) -> None:
        asks = mixed_asks(8, seed=2)
        expected = all_bits(serve_all(engines[name], asks))
        order = list(range(len(asks)))
        rng = random.Random(5)
        rng.shuffle(order)
        serving, rids = Serving(engines[name]), {}
        for index in order:
            rids[index] = serving.submit(asks[index])
            for _ in range(rng.randrange(6)):
                serving.step()
        serving.run()
        assert expected == [serving.outcomes[rids[index]].bits for index in range(len(asks))]

    def test_whatever_a_page_held_before(self, folders: dict[str, Path], engines: dict[str, Engine], name: str) -> None:
        asks = mixed_asks(8, seed=3)
        plain = tiny_engine(folders[name], poison=False)
        assert all_bits(serve_all(engines[name], asks)) == all_bits(serve_all(plain, asks))

    def test_packed_planes_or_rectangular(
        self, folders: dict[str, Path], engines: dict[str, Engine], name: str
    ) -> None:
        asks = mixed_asks(6, seed=4)
        rectangular = tiny_engine(folders[name], pack_recurrent_planes=False)
        assert all_bits(serve_all(engines[name], asks)) == all_bits(serve_all(rectangular, asks))

    def test_whatever_the_page_length(self, folders: dict[str, Path], engines: dict[str, Engine], name: str) -> None:
        asks = mixed_asks(6, seed=6)
        assert all_bits(serve_all(engines[name], asks)) == all_bits(
            serve_all(tiny_engine(folders[name], page_tokens=7), asks)
        )

    @pytest.mark.parametrize("layout", ["shared", "budgeted:2"])
    def test_in_layouts_that_overwrite_planes(self, folders: dict[str, Path], name: str, layout: str) -> None:
        engine = tiny_engine(folders[name], kv_layout=layout, poison=True)
        asks = mixed_asks(4, seed=7, lengths=(1, 5, 9))
        together = all_bits(serve_all(engine, asks))
        assert all_bits(serve_alone(engine, asks)) == together
        assert together == all_bits(serve_all(engine, asks, chunk_tokens=2))


def test_budgeted_with_every_plane_is_last_exited(folders: dict[str, Path], engines: dict[str, Engine]) -> None:
    asks = mixed_asks(4, seed=8, lengths=(2, 9))
    assert all_bits(serve_all(engines["ouro"], asks)) == all_bits(
        serve_all(tiny_engine(folders["ouro"], kv_layout="budgeted:4"), asks)
    )


def test_shared_is_budgeted_with_one_plane_and_another_model_than_last_exited(
    folders: dict[str, Path], engines: dict[str, Engine]
) -> None:
    asks = mixed_asks(4, seed=8, lengths=(2, 9))
    shared = all_bits(serve_all(tiny_engine(folders["ouro"], kv_layout="shared"), asks))
    assert shared == all_bits(serve_all(tiny_engine(folders["ouro"], kv_layout="budgeted:1"), asks))
    assert shared != all_bits(serve_all(engines["ouro"], asks))


@pytest.mark.parametrize("rule", ["fixed", "ouro_delayed", "random_lookahead", "latent_diff"])
def test_under_every_exit_rule(folders: dict[str, Path], rule: str) -> None:
    engine = tiny_engine(folders["ouro"], exit_rule=rule)
    asks = mixed_asks(5, seed=9)
    assert all_bits(serve_alone(engine, asks)) == all_bits(serve_all(engine, asks))
