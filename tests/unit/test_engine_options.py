"""Options that no model or machine can make right are refused with a clear text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.errors import EngineError, OptionError, SelfCheckError
from epicycle.engine.kernels.tiled import TiledOps
from epicycle.engine.selfcheck import choose_ops
from epicycle.engine.setup import resolve_device, resolve_dtype, serve_loops
from epicycle.kvstore.errors import LayoutRefused, PlanRefused
from epicycle.tools.engine_options import read_options
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, floats, serve_all, tiny_engine, tiny_folder
from tests.fakes.tiny_models import OURO, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "ouro")


@pytest.mark.parametrize(("field", "value"), [("slots", 0), ("page_tokens", 0), ("loops", -1), ("cpu_threads", 0)])
def test_a_number_out_of_its_range_names_itself(field: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"engine.{field} is {value}, must be between"):
        read_options({field: value})


def test_more_loops_than_the_model_has_are_refused() -> None:
    spec = spec_of(OURO)
    assert (4, 3) == (serve_loops(spec, 0).loops, serve_loops(spec, 3).loops)
    with pytest.raises(OptionError, match="loops is 5; ouro was made for at most 4"):
        serve_loops(spec, 5)


def test_auto_follows_the_device() -> None:
    assert torch.float32 == resolve_dtype("auto", torch.device("cpu"))
    assert torch.bfloat16 == resolve_dtype("auto", torch.device("cuda"))
    with pytest.raises(OptionError, match="device is 'moon'"):
        resolve_device("moon")


def test_a_layout_or_pool_that_cannot_be_is_refused_by_its_owner(folder: Path) -> None:
    with pytest.raises(LayoutRefused, match="budgeted:9"):
        tiny_engine(folder, kv_layout="budgeted:9")
    with pytest.raises(PlanRefused, match="kv_memory_bytes"):
        tiny_engine(folder, kv_memory_bytes=1000)


def test_an_exit_rule_the_model_cannot_feed_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"lookahead\.safetensors"):
        tiny_engine(folder, exit_rule="lookahead")


def test_random_weights_need_no_checkpoint() -> None:
    options = EngineConfig(model="embedded:ouro", weights="random", random_seed=3, slots=1, context_tokens=32)
    first, second = (Engine.load(options) for _ in range(2))
    ask = Ask([1, 2, 3], Sampling(max_tokens=3, temperature=0.0, logprobs=0))
    assert serve_all(first, [ask])[0].bits == serve_all(second, [ask])[0].bits
    assert first.capabilities().fingerprint == second.capabilities().fingerprint


def test_other_dtypes_can_be_served(folder: Path) -> None:
    engine = tiny_engine(folder, dtype="bfloat16")
    ask = Ask([5, 9, 33], Sampling(max_tokens=6, temperature=0.0, logprobs=0), LoopBounds(exit_threshold=0.5))
    alone = serve_all(engine, [ask])[0]
    others = [Ask([number, 4], Sampling(max_tokens=9)) for number in range(5)]
    assert alone.bits == serve_all(engine, [ask, *others])[0].bits
    assert "bfloat16" == engine.capabilities().dtype


def test_fast_numerics_agree_within_rounding(folder: Path) -> None:
    ask = Ask([5, 9, 33, 8], Sampling(max_tokens=6, temperature=0.0, logprobs=0))
    exact, fast = (serve_all(tiny_engine(folder, numerics=mode), [ask])[0] for mode in ("invariant", "fast"))
    assert exact.tokens == fast.tokens
    assert floats(exact.logprobs) == pytest.approx(floats(fast.logprobs), abs=1e-4)


class _RowCounting(TiledOps):
    """Products that depend on how many rows there are, as some libraries' do."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().linear(x, weight, bias) * (1 + 1e-6 * len(x))


def test_numerics_that_follow_the_batch_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epicycle.engine.selfcheck.TiledOps", _RowCounting)
    with pytest.raises(SelfCheckError, match="set cpu_threads to 1, or serve with numerics fast"):
        choose_ops(spec_of(OURO), torch.float32, 20)
