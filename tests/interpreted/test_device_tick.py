"""Whole requests through the GPU's tick in the interpreter: tokens and depths of the eager tick on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from epicycle.engine import gpu
from epicycle.engine.device_tick import make_tensors
from epicycle.engine.engine import Engine
from epicycle.engine.flash_attention import FlashParts
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.models.build import assemble
from epicycle.engine.pump import Pump
from epicycle.engine.tick_inputs import Ladder
from epicycle.transport.wire.columns import F32, I32, pack
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.flash import PlainFlash
from tests.fakes.serving import EPOCH, Ask, Serving, floats, serve_all, tiny_engine, tiny_folder
from tests.fakes.tiny_models import CONFIGS, lively_weights, spec_of

# What is computed for rows that aren't live may overflow, and the interpreter wraps 64-bit products with a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ASKS = [
    Ask([7, 3, 40, 11, 2], Sampling(max_tokens=2, temperature=0.0)),
    Ask([5, 9], Sampling(max_tokens=3, temperature=0.0), LoopBounds(min_loops=1, exit_threshold=0.55)),
    Ask([1, 2, 3], Sampling(max_tokens=2, temperature=0.0, stop_ids=pack(I32, list(range(0, 61, 2))))),
]
SAMPLED = [
    Ask([7, 3, 40], Sampling(max_tokens=3, temperature=0.8, seed=4, logprobs=2, prompt_logprobs=1)),
    Ask(
        [5, 9, 9],
        Sampling(max_tokens=4, temperature=1.2, top_p=0.8, top_k=20, seed=5, presence_penalty=0.7, logprobs=0),
        LoopBounds(min_loops=1, exit_threshold=0.55),
    ),
    Ask(
        [1, 2],
        Sampling(
            max_tokens=3,
            temperature=0.0,
            min_tokens=2,
            repetition_penalty=1.5,
            stop_ids=pack(I32, list(range(0, 61, 2))),
            logit_bias_ids=pack(I32, [3, 5]),
            logit_bias_values=pack(F32, [2.0, -1.0]),
            logprobs=1,
        ),
    ),
]


def kernel_pump(engine: Engine, name: str, flash: FlashParts | None = None) -> Pump:
    """A pump whose tick runs through the interpreted kernels."""
    spec, ops = spec_of(CONFIGS[name]), TritonOps()
    model = assemble(spec, lively_weights(spec), ops)
    slots = engine.new_slots()
    tensors = make_tensors(slots, Ladder.of(engine.plan.slots, 16))
    tick, _ = gpu.make_tick(
        model,
        ops,
        engine.pool,
        tensors,
        engine.rule,
        engine.rule_name,
        has_graphs=False,
        on_progress=lambda _: None,
        flash=flash or FlashParts(),
    )
    return engine.make_pump(slots, tick, EPOCH)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_requests_get_the_eager_tick_s_tokens(name: str, tmp_path: Path) -> None:
    engine = tiny_engine(tiny_folder(tmp_path, name), slots=3)
    expected = serve_all(engine, ASKS)
    serving = Serving(engine, kernel_pump(engine, name))
    rids = [serving.submit(ask) for ask in ASKS]
    serving.run()
    actual = [serving.outcomes[rid] for rid in rids]
    assert [(it.tokens, it.depths, it.reason) for it in expected] == [
        (it.tokens, it.depths, it.reason) for it in actual
    ]


@pytest.mark.parametrize("name", ["ouro", "huginn_raven"])
def test_attention_by_another_library_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    engine = tiny_engine(tiny_folder(tmp_path, name), slots=3)
    expected = serve_all(engine, ASKS)
    decode, prompt = PlainFlash(), PlainFlash()
    serving = Serving(engine, kernel_pump(engine, name, FlashParts(decode, prompt)))
    rids = [serving.submit(ask) for ask in ASKS]
    serving.run()
    assert [(it.tokens, it.depths) for it in expected] == [
        (serving.outcomes[rid].tokens, serving.outcomes[rid].depths) for rid in rids
    ]
    assert ({"decode"}, {"prompt"}) == (set(decode.calls), set(prompt.calls))


def test_sampled_rows_and_their_reports_are_those_of_the_eager_tick(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_folder(tmp_path, "ouro"), slots=3)
    expected = serve_all(engine, SAMPLED)
    serving = Serving(engine, kernel_pump(engine, "ouro"))
    rids = [serving.submit(ask) for ask in SAMPLED]
    serving.run()
    for recorded, rid in zip(expected, rids, strict=True):
        served = serving.outcomes[rid]
        assert (recorded.tokens, recorded.depths, recorded.reason) == (served.tokens, served.depths, served.reason)
        assert recorded.top_ids == served.top_ids
        assert pytest.approx(floats(recorded.logprobs), abs=1e-4) == floats(served.logprobs)
        assert pytest.approx(floats(recorded.top_logprobs), abs=1e-4) == floats(served.top_logprobs)
        assert pytest.approx(floats(recorded.prompt_logprobs), abs=1e-4) == floats(served.prompt_logprobs)
