"""A row that is taken off the device at any moment, and comes back elsewhere, says what it would have said anyway."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from epicycle.engine.engine import Engine
from epicycle.tools.offline import Offline, Reply, Request
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.columns import I32, U16, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.late_mover import make_copies_late
from tests.fakes.late_tick import late_pump
from tests.fakes.serving import tiny_engine, tiny_folder

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "ouro": ("ouro", {}),
    "ouro-lookahead": ("ouro", {"exit_rule": "random_lookahead"}),
    "ouro-delayed": ("ouro", {"exit_rule": "ouro_delayed"}),
    "ouro-trace": ("ouro", {"exit_rule": "trace"}),
    "huginn": ("huginn_raven", {}),
    "nanbeige": ("nanbeige", {}),
    "ouro-shared": ("ouro", {"kv_layout": "shared"}),
    "ouro-budgeted": ("ouro", {"kv_layout": "budgeted:2"}),
    "huginn-rectangular": ("huginn_raven", {"pack_recurrent_planes": False}),
    "ouro-device-tick": ("ouro", {"tick": "device", "run_ahead_ticks": 3}),
    "huginn-device-tick": ("huginn_raven", {"tick": "device", "run_ahead_ticks": 2}),
}
Bits = list[tuple[object, ...]]


@pytest.fixture(scope="module", params=SERVED)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Poisoned, so that a page let go of too early shows."""
    name, options = SERVED[request.param]
    folder: Path = tiny_folder(tmp_path_factory.mktemp("m"), name)
    return tiny_engine(folder, poison=True, prompt_chunk_tokens=5, slots=4, **options)


def mix(engine: Engine, seed: int = 0) -> list[Request]:
    """Long and short, greedy and sampled, deep and shallow, scored prompts and unscored."""
    rng = random.Random(seed)
    return [_request(engine, rng, number) for number in range(6)]


def _request(engine: Engine, rng: random.Random, number: int) -> Request:
    outputs = rng.randint(3, 9)
    plain = Sampling(outputs, temperature=0.0, logprobs=2, prompt_logprobs=1 if number == 2 else -1)
    drawn = Sampling(
        outputs,
        temperature=1.3,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        seed=number,
        min_tokens=2,
        stop_ids=pack(I32, range(0, 61, 7)),
        logprobs=0,
    )
    bounds = LoopBounds(exit_threshold=rng.choice((0.4, 0.7, 1.0)), max_loops=rng.choice((0, 0, 3)))
    if engine.rule_entry.needs_trace:
        depths = [engine.spec.loops, *(rng.randint(1, engine.spec.loops) for _ in range(outputs))]
        bounds = LoopBounds(exit_trace=pack(U16, depths))
    return Request(
        prompt=[rng.randrange(61) for _ in range(rng.choice((1, 4, 9, 16)))],
        sampling=drawn if number % 2 else plain,
        loops=bounds,
        noise_seed=number % 2,
    )


def bits(replies: list[Reply]) -> Bits:
    return [
        (reply.tokens, reply.exit_depths, reply.logprobs, reply.prompt_logprobs, reply.end and reply.end.reason)
        for reply in replies
    ]


def alone(engine: Engine, requests: list[Request]) -> Bits:
    return bits([Offline(engine).run([request])[0] for request in requests])


def run_with_preemptions(offline: Offline, requests: list[Request], dice: random.Random) -> list[Reply]:
    replies = [offline.submit(request) for request in requests]
    while offline.step():
        spoil_free_slots(offline)
        if dice.random() < 0.4:
            offline.preempt(dice.choice)
    return replies


def spoil_free_slots(offline: Offline) -> None:
    """Nobody may find in a slot what its last owner left there, even if that was itself."""
    slots, free = offline.pump._slots, offline._free_slots
    for column in (slots.state, slots.survival, *([] if slots.previous_final is None else [slots.previous_final])):
        column[free] = float("nan")
    for column in (slots.token, slots.position, slots.outputs):
        column[free] = 60
    slots.sampling.output_counts[free] = 3


@pytest.mark.parametrize("seed", range(2))
def test_preempted_equals_alone(engine: Engine, seed: int) -> None:
    requests = mix(engine, seed)
    offline = Offline(engine, grow_tokens=seed, prefix_cache=seed == 1)
    replies = run_with_preemptions(offline, requests, random.Random(seed))
    assert alone(engine, requests) == bits(replies)
    assert offline.preemptions > 5
    assert offline.pool.census().is_even
    assert offline.pool.ledger.used_pages == offline.pool.index.unreferenced_pages


def test_late_copies_and_late_ticks_change_nothing(engine: Engine) -> None:
    requests = mix(engine, 5)
    expected = alone(engine, requests)
    mover = make_copies_late(engine, 4)
    try:
        offline = Offline(engine, prefix_cache=True)
        if engine.options.tick == "device":
            offline.pump = late_pump(engine, 3, epoch=1)[0]
        else:
            offline.pump = engine.new_pump(1)
        replies = run_with_preemptions(offline, requests, random.Random(9))
    finally:
        engine._mover = mover._mover
    assert expected == bits(replies)
    assert min(mover.saved_pages, mover.loaded_pages) > 5


def test_prompt_pages_that_are_still_cached_are_not_copied_back(engine: Engine) -> None:
    prompt = [(5 * place) % 61 for place in range(16)]
    depths = pack(U16, [engine.spec.loops] * 4)
    request = Request(prompt=prompt, sampling=Sampling(4, temperature=0.0), loops=LoopBounds(exit_trace=depths))
    mover = make_copies_late(engine, 1)
    try:
        offline = Offline(engine, prefix_cache=True)
        reply = offline.submit(request)
        while len(reply.tokens) < 2:
            offline.step()
        offline.preempt(min)
        while offline.step():
            pass
    finally:
        engine._mover = mover._mover
    assert alone(engine, [request]) == bits([reply])
    assert (5, 1, 4) == (mover.saved_pages, mover.loaded_pages, offline.attached_pages)


def test_a_head_that_reads_the_previous_token_s_state_finds_it_again() -> None:
    engine = Engine.load(EngineConfig(slots=2, context_tokens=64, exit_rule="lookahead", poison=True))
    requests = [
        Request(
            prompt=[(7 * place + number) % 900 + 3 for place in range(9)],
            sampling=Sampling(14, temperature=0.0, logprobs=0),
            loops=LoopBounds(exit_threshold=0.5),
        )
        for number in range(2)
    ]
    offline = Offline(engine)
    replies = run_with_preemptions(offline, requests, random.Random(1))
    assert alone(engine, requests) == bits(replies)
    assert offline.preemptions > 3
    assert len({depth for reply in replies for depth in reply.exit_depths}) > 1
