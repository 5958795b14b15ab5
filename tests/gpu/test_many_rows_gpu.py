"""More rows that decode at once than verify's default conditions had for long: launches of 65 to 128 rows begin early,
and no row's bits may show it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.hardware import give_back_memory
from epicycle.transport.config import EngineConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, Outcome, Serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]
REQUESTS, COMPARED, TIMES = 120, 12, 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < 24 << 30:
        pytest.skip(f"{free_bytes >> 30} GiB of GPU memory are free, 24 are needed")
    sizes = {"slots": 128, "context_tokens": 256, "kv_memory_bytes": 14 << 30}
    yield Engine.load(EngineConfig(model="ouro-1.4b", weights="random", device="cuda", **sizes))  # type: ignore[arg-type]
    give_back_memory()


@pytest.mark.parametrize("is_fixed", [True, False], ids=["whole tokens", "a loop a tick"])
def test_their_bits_are_those_they_have_alone_every_time(engine: Engine, is_fixed: bool) -> None:
    asks = [_ask(engine, number, is_fixed=is_fixed) for number in range(REQUESTS)]
    compared = range(0, REQUESTS, REQUESTS // COMPARED)
    alone = [_serve(engine, [asks[number]])[0].bits for number in compared]
    for time in range(TIMES):
        together = _serve(engine, asks)
        differ = [number for number, bits in zip(compared, alone, strict=True) if together[number].bits != bits]
        assert not differ, f"requests {differ} differ in company, the {time + 1}. time"


def _ask(engine: Engine, number: int, *, is_fixed: bool) -> Ask:
    length = 5 + 7 * number % 61
    prompt = [(11 * number + 17 * place * (number + 1)) % (engine.spec.vocab_size - 9) + 5 for place in range(length)]
    loops = LoopBounds(exit_threshold=1.0) if is_fixed else LoopBounds(min_loops=1, exit_threshold=0.5)
    return Ask(prompt, Sampling(max_tokens=48, temperature=0.0, logprobs=1), loops)


def _serve(engine: Engine, asks: list[Ask]) -> list[Outcome]:
    serving = Serving(engine)
    rids = [serving.submit(ask) for ask in asks]
    serving.run()
    return [serving.outcomes[rid] for rid in rids]
