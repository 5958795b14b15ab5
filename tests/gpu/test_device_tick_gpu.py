"""The device tick on a GPU: graphs have the bits of single launches, a request has its own bits in any company and
chunking, the host never waits, and engines that follow one another find the same room."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from epicycle.engine import tick_kernels
from epicycle.engine.engine import Engine
from epicycle.engine.read_out import plain_sample
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.plan import Knobs
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, Outcome, Serving, floats, serve_alone, tiny_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]
MODELS = ("embedded:ouro", "embedded:huginn")
MIB = 1 << 20
TOKEN_MARGIN = 2e-3  # below it another correct order of float32 sums may pick the other token


def load(model: str, **options: object) -> Engine:
    defaults: dict[str, object] = {"slots": 24, "context_tokens": 256, "device": "cuda"}
    return Engine.load(EngineConfig(model=model, **(defaults | options)))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return load(request.param)


def asks(engine: Engine) -> list[Ask]:
    """Every kind of row: fixed depth and early exits, greedy and drawn, with and without reports and stops."""
    threshold = 0.5 if engine.spec.has_gate else 0.9
    bounds = (LoopBounds(), LoopBounds(min_loops=1, exit_threshold=threshold), LoopBounds(max_loops=3))
    samplings = (
        Sampling(max_tokens=14, temperature=0.0),
        Sampling(max_tokens=14, temperature=0.0, logprobs=2, prompt_logprobs=1),
        Sampling(max_tokens=10, temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=0),
        Sampling(max_tokens=30, temperature=0.0, stop_ids=pack(I32, list(range(0, engine.spec.vocab_size, 7))[:60])),
    )
    return [
        Ask(
            [(7 * number + 13 * place) % (engine.spec.vocab_size - 9) + 5 for place in range(2 + 6 * number)],
            samplings[number % 4],
            bounds[number % 3],
        )
        for number in range(20)
    ]


def sampled_asks(engine: Engine) -> list[Ask]:
    """Rows that all leave early and draw, by every field of the sampler in turn."""
    threshold = 0.5 if engine.spec.has_gate else 0.9
    drawn = Sampling(max_tokens=16, temperature=0.8, logprobs=0)
    some = [
        drawn,
        msgspec.structs.replace(drawn, top_k=20, logprobs=3),
        msgspec.structs.replace(drawn, top_p=0.8),
        msgspec.structs.replace(drawn, min_p=0.05, temperature=1.3, logprobs=20),
        msgspec.structs.replace(drawn, top_k=200, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.2),
        msgspec.structs.replace(drawn, repetition_penalty=1.2, temperature=0.0),
        msgspec.structs.replace(
            drawn,
            min_tokens=9,
            stop_ids=pack(I32, list(range(0, engine.spec.vocab_size, 7))[:60]),
            logit_bias_ids=pack(I32, [7, 21]),
            logit_bias_values=pack(F32, [4.0, -2.0]),
        ),
    ]
    return [
        Ask(
            [(11 * number + 5 * place) % (engine.spec.vocab_size - 9) + 5 for place in range(3 + 4 * number)],
            msgspec.structs.replace(some[number % len(some)], seed=number),
            LoopBounds(min_loops=1, exit_threshold=threshold),
        )
        for number in range(21)
    ]


def crowd(engine: Engine, all_asks: list[Ask], chunk_tokens: int = 0) -> list[Outcome]:
    serving = Serving(engine)
    serving.plan(knobs=Knobs(prompt_chunk_tokens=chunk_tokens))
    rids = [serving.submit(ask) for ask in all_asks]
    serving.run()
    return [serving.outcomes[rid] for rid in rids]


def bits(outcomes: list[Outcome]) -> list[tuple[object, ...]]:
    return [outcome.bits for outcome in outcomes]


class TestBits:
    def test_a_request_alone_in_a_crowd_and_in_chunks(self, engine: Engine) -> None:
        together = bits(crowd(engine, asks(engine)))
        assert bits(serve_alone(engine, asks(engine))) == together
        assert bits(crowd(engine, asks(engine), chunk_tokens=17)) == together
        counters = engine.run_counters
        assert counters is not None
        assert counters.whole_tokens > 0
        assert counters.replays > 50 * counters.eager_parts

    def test_graphs_have_the_bits_of_single_launches(self, engine: Engine) -> None:
        options = replace_options(engine, graphs="off", run_ahead_ticks=4)
        assert bits(crowd(engine, asks(engine))) == bits(crowd(Engine.load(options), asks(engine)))

    def test_sampled_rows_alone_in_a_crowd_and_without_graphs(self, engine: Engine) -> None:
        together = bits(crowd(engine, sampled_asks(engine)))
        assert bits(serve_alone(engine, sampled_asks(engine))) == together
        assert bits(crowd(Engine.load(replace_options(engine, graphs="off")), sampled_asks(engine))) == together
        counters = engine.run_counters
        assert counters is not None
        assert counters.replays > 50 * counters.eager_parts

    def test_the_sampler_s_kernel_draws_the_tokens_of_its_twin(self, engine: Engine) -> None:
        """Weights may differ in their last bits, which the draws of these seeds don't see."""
        with torch_samples():
            plain = Engine.load(replace_options(engine, graphs="off"))
            expected = crowd(plain, sampled_asks(engine))
        actual = crowd(engine, sampled_asks(engine))
        assert [outcome.tokens for outcome in expected] == [outcome.tokens for outcome in actual]
        assert [outcome.top_ids for outcome in expected] == [outcome.top_ids for outcome in actual]
        for plainly, outcome in zip(expected, actual, strict=True):
            assert pytest.approx(floats(plainly.logprobs), abs=1e-5) == floats(outcome.logprobs)

    def test_what_a_page_held_before_is_never_read(self, engine: Engine) -> None:
        poisoned = Engine.load(replace_options(engine, poison=True, prompt_chunk_tokens=48))
        assert bits(crowd(engine, asks(engine))) == bits(crowd(poisoned, asks(engine)))

    @pytest.mark.parametrize("layout", ["shared", "budgeted:2"])
    def test_layouts_that_overwrite_planes(self, layout: str) -> None:
        engine = load("embedded:ouro", kv_layout=layout, slots=8)
        some = asks(engine)[:8]
        assert bits(serve_alone(engine, some)) == bits(crowd(engine, some))

    def test_a_model_without_fused_loops(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path, "nanbeige")
        engine = load(str(folder), slots=8, context_tokens=64)
        some = [replace(ask, prompt=[token % 61 for token in ask.prompt][:20]) for ask in asks(engine)[:8]]
        together = bits(crowd(engine, some))
        assert bits(serve_alone(engine, some)) == together
        assert bits(crowd(Engine.load(replace_options(engine, graphs="off")), some)) == together

    def test_float32_gives_the_recorded_tokens_and_depths(self) -> None:
        engine = load("embedded:ouro", dtype="float32", graphs="off")
        cases = json.loads(Path(engine.files.folder / "golden_serving.json").read_text())["cases"]
        pairs = [(case, run) for case in cases for run in case["runs"]]
        stop_ids = pack(I32, engine.spec.eos_ids)
        outcomes = crowd(
            engine,
            [
                Ask(
                    case["prompt_ids"],
                    Sampling(max_tokens=len(run["ids"]), temperature=0.0, stop_ids=stop_ids),
                    LoopBounds(
                        min_loops=run["min_loops"], max_loops=run["max_loops"], exit_threshold=run["exit_threshold"]
                    ),
                )
                for case, run in pairs
            ],
        )
        sure = [
            ((run["ids"], run["exit_depths"]), (outcome.tokens, outcome.depths))
            for (_, run), outcome in zip(pairs, outcomes, strict=True)
            if run["smallest_top2_margin"] > TOKEN_MARGIN
        ]
        assert sure
        assert [recorded for recorded, _ in sure] == [served for _, served in sure]


def replace_options(engine: Engine, **changes: object) -> EngineConfig:
    options = {name: getattr(engine.options, name) for name in EngineConfig.__struct_fields__}
    return EngineConfig(**(options | changes))


@contextmanager
def torch_samples() -> Iterator[None]:
    """Engines loaded inside sample by the kernel's twin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tick_kernels, "sample", plain_sample)
        yield


@contextmanager
def waits_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the mode is young
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device_while_requests_join_run_and_end(engine: Engine) -> None:
    drawn = replace(asks(engine)[2], sampling=Sampling(max_tokens=20, temperature=0.7, seed=1, logprobs=1))
    rounds = [asks(engine)[0], drawn, asks(engine)[1], asks(engine)[3], *sampled_asks(engine)[3:6]]
    crowd(engine, rounds)  # what is made once is there after this
    serving = Serving(engine)
    with waits_are_errors():
        for ask in rounds * 2:
            serving.submit(ask)
            for _ in range(20):
                serving.step()
    serving.run()
    assert 14 == sum(outcome.reason in ("stop", "length") for outcome in serving.outcomes.values())


def test_engines_that_follow_one_another_find_the_same_room() -> None:
    rooms, pages = [], []
    for _ in range(2):
        engine = load("embedded:ouro", context_tokens=0, slots=8)
        crowd(engine, asks(engine)[:4])
        rooms.append(engine.plan.room_bytes)
        pages.append(engine.plan.total_pages)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert abs(rooms[0] - rooms[1]) <= 16 * MIB
    assert abs(pages[0] - pages[1]) <= 1
