"""What fails on a GPU, provoked there: a kernel that breaks in a tick, memory that isn't there, logits that are NaN."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.errors import EngineError
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import Sampling
from tests.e2e.live.faults import check_a_failed_tick
from tests.fakes.serving import Ask, Serving, serve_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(240),
]
GREEDY = Sampling(max_tokens=40, temperature=0.0, logprobs=0)
BROKEN = 2


async def test_a_failed_tick_ends_its_requests_and_the_executor_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_a_failed_tick(tmp_path, monkeypatch, "--slots", "8", "--set", "engine.device=cuda")


def test_a_pool_that_does_not_fit_is_refused_with_its_plan_and_the_knobs() -> None:
    options = EngineConfig(
        model="ouro-1.4b", weights="random", device="cuda", slots=64, context_tokens=65536, graphs="off",
        kv_memory_bytes=400 << 30,
    )  # fmt: skip
    with pytest.raises(EngineError) as refused:
        Engine.load(options)
    text = str(refused.value)
    assert "out_of_memory" == refused.value.code
    assert "64 slots x 65,536 tokens of context" in text
    assert "GiB in 400.00 GiB of room" in text
    assert "lower kv_memory_bytes, slots, context_tokens or prompt_chunk_tokens" in text
    del refused
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("model", ["embedded:ouro", "embedded:huginn"])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_logits_that_are_not_numbers_fail_their_request_alone(model: str, graphs: str) -> None:
    engine = Engine.load(EngineConfig(model=model, slots=8, context_tokens=128, device="cuda", graphs=graphs))
    asks = [Ask([5 + number, 9, 11, 20 + number], GREEDY) for number in range(6)]
    expected = serve_alone(engine, asks)
    serving = Serving(engine)
    rids = [serving.submit(ask) for ask in asks]
    while not serving.outcomes[rids[BROKEN]].tokens:
        serving.step()
    _, pages = serving.held[rids[BROKEN]]
    engine.pool.poison(torch.tensor(pages, device="cuda"))
    serving.run()
    broken = serving.outcomes[rids[BROKEN]]
    done = len(broken.tokens)
    assert broken.fin is not None
    assert ("error", "server_error") == (broken.reason, broken.fin.code)
    assert 0 < done < GREEDY.max_tokens
    message = f"request {rids[BROKEN]}: the logits of output {done} are not finite at depth {engine.spec.loops}"
    assert message in broken.fin.message
    others = [place for place in range(6) if place != BROKEN]
    assert [expected[place].bits for place in others] == [serving.outcomes[rids[place]].bits for place in others]
    again = serving.submit(asks[BROKEN])  # whoever gets those pages next must not see what they hold
    serving.run()
    assert expected[BROKEN].bits == serving.outcomes[again].bits
