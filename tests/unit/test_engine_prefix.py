"""A prompt whose beginning is cached gives the bits of one computed whole, whoever shares its pages meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from epicycle.engine.engine import Engine
from epicycle.tools.offline import Offline, Reply, Request
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import tiny_engine, tiny_folder

PAGE = 4
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "ouro": ("ouro", {}),
    "huginn": ("huginn_raven", {}),
    "nanbeige": ("nanbeige", {}),
    "ouro-shared": ("ouro", {"kv_layout": "shared"}),
    "ouro-device-tick": ("ouro", {"tick": "device", "run_ahead_ticks": 3}),
    "huginn-device-tick": ("huginn_raven", {"tick": "device", "run_ahead_ticks": 3}),
}


@pytest.fixture(scope="module", params=SERVED)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Poisoned, so that a page shared by mistake shows."""
    name, options = SERVED[request.param]
    folder: Path = tiny_folder(tmp_path_factory.mktemp("m"), name)
    return tiny_engine(folder, poison=True, **options)


def family(seed: int) -> list[Request]:
    """Prompts that begin alike: whole pages, half ones, repeats; greedy and sampled, deep and shallow."""
    rng = random.Random(seed)
    trunk = [rng.randrange(61) for _ in range(16)]
    requests = []
    for at, length in enumerate((1, 4, 9, 12, 12, 16)):
        tail = [rng.randrange(61) for _ in range(rng.choice((0, 0, 3)))]
        sampling = Sampling(rng.randint(1, 4), temperature=rng.choice((0.0, 1.0)), seed=at, logprobs=0)
        loops = LoopBounds(exit_threshold=rng.choice((0.4, 0.7, 1.0)))
        requests.append(Request(prompt=trunk[:length] + tail, sampling=sampling, loops=loops))
    return requests


def bits(replies: list[Reply]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(reply.tokens, reply.exit_depths, reply.logprobs) for reply in replies]


def alone(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list[int], list[float]]]:
    return bits([Offline(engine).run([request])[0] for request in requests])


@pytest.fixture(scope="module")
def cold(engine: Engine) -> list[tuple[list[int], list[int], list[float]]]:
    """What the family's requests say on their own, without a cache."""
    return alone(engine, family(0))


@pytest.mark.parametrize(("streams", "chunk_tokens"), [(1, 16), (4, 5)])
def test_cached_equals_cold(
    engine: Engine, cold: list[tuple[list[int], list[int], list[float]]], streams: int, chunk_tokens: int
) -> None:
    requests = family(0)
    offline = Offline(engine, prefix_cache=True)
    offline.pump._prompts.chunk_tokens = chunk_tokens
    assert cold == bits(offline.run(requests, streams))
    before = offline.hit_tokens
    again = offline.run(requests, streams)
    assert cold == bits(again)
    assert offline.hit_tokens - before == sum(reply.cached_tokens for reply in again)
    step = engine.pool.facts.serial_prompts
    whole_pages = [(len(request.prompt) - step) // PAGE * PAGE for request in requests]
    limits = [min(tokens, len(request.prompt) - 1) for tokens, request in zip(whole_pages, requests, strict=True)]
    assert limits == [reply.cached_tokens for reply in again]


def test_a_whole_repeat_does_not_disturb_those_that_read_its_pages(engine: Engine) -> None:
    prompt = list(range(3, 11))
    requests = [
        Request(prompt=prompt, sampling=Sampling(4, temperature=1.0, seed=seed, logprobs=0)) for seed in range(3)
    ]
    cold = alone(engine, requests)
    offline = Offline(engine, prefix_cache=True)
    replies = [offline.submit(requests[0])]
    while not replies[0].tokens:
        offline.step()
    for request in requests[1:]:
        replies.append(offline.submit(request))
        for _ in range(3):  # every one joins while the others are between loops of their tokens
            offline.step()
    while offline.step():
        pass
    assert cold == bits(replies)
    assert [0] + [4 if engine.pool.facts.serial_prompts else 7] * 2 == [reply.cached_tokens for reply in replies]


def test_noise_keeps_prompts_apart(engine: Engine) -> None:
    requests = [
        Request(prompt=list(range(3, 9)), sampling=Sampling(1, temperature=0.0, logprobs=0), noise_seed=seed)
        for seed in (0, 1, 0)
    ]
    replies = Offline(engine, prefix_cache=True).run(requests, 1)
    assert alone(engine, requests) == bits(replies)
    assert [True, True, False] == [reply.cached_tokens == 0 for reply in replies]


def test_a_pool_under_pressure_evicts_and_stays_exact(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_folder(tmp_path, "ouro"), poison=True)
    offline = Offline(engine, prefix_cache=True)
    offline.pool.claim("somebody else", offline.pool.total_pages - 7)
    first, second = family(0)[2:], family(1)[2:]
    requests = [*first, *second, *first]
    cold = alone(engine, first)
    assert [*cold, *alone(engine, second), *cold] == bits(offline.run(requests, 1))
    assert offline.pool.census().is_even
    roomy = Offline(engine, prefix_cache=True)
    roomy.run(requests, 1)
    assert 0 < offline.hit_tokens < roomy.hit_tokens


@pytest.mark.parametrize("model", ["embedded:ouro", "embedded:huginn"])
def test_embedded_models_continue_a_conversation_as_if_from_the_start(model: str) -> None:
    engine = Engine.load(EngineConfig(model=model, slots=1, context_tokens=96))
    rng = random.Random(7)
    offline, prompt = Offline(engine, prefix_cache=True), [rng.randrange(3, 900) for _ in range(21)]
    sampling, loops = Sampling(4, temperature=0.8, seed=3, logprobs=0), LoopBounds(exit_threshold=0.7)
    for turn in range(2):
        request = Request(prompt=prompt, sampling=sampling, loops=loops)
        [reply] = offline.run([request])
        assert alone(engine, [request]) == bits([reply])
        assert [0, 16][turn] == reply.cached_tokens
        prompt = prompt + reply.tokens + [rng.randrange(3, 900) for _ in range(8)]
