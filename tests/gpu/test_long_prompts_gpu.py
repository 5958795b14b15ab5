"""Prompts of a model as large as those served, in pieces and beside one another: their bits are those they have alone,
every time. Small models' ticks are too short for kernels to get in one another's way."""

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
LENGTHS = (1500, 900, 2600, 300, 40, 3000, 17, 700, 2047, 1)
"""Short last pieces of ticks whose others are deep (3,000 begins with 104 rows), and decode rows beside all of them."""
TIMES = 8


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < 24 << 30:
        pytest.skip(f"{free_bytes >> 30} GiB of GPU memory are free, 24 are needed")
    sizes = {"slots": 24, "context_tokens": 4096, "kv_memory_bytes": 14 << 30}
    yield Engine.load(EngineConfig(model="ouro-1.4b", weights="random", device="cuda", **sizes))  # type: ignore[arg-type]
    give_back_memory()


def test_their_bits_are_those_they_have_alone_every_time(engine: Engine) -> None:
    asks = [_ask(engine, number, length) for number, length in enumerate(LENGTHS)]
    alone = [_serve(engine, [ask])[0].bits for ask in asks]
    for time in range(TIMES):
        together = [outcome.bits for outcome in _serve(engine, asks)]
        differ = [length for length, one, other in zip(LENGTHS, alone, together, strict=True) if one != other]
        assert not differ, f"prompts of {differ} tokens differ in company, the {time + 1}. time"


def _ask(engine: Engine, number: int, length: int) -> Ask:
    prompt = [(7 * number + 13 * place * (number + 1)) % (engine.spec.vocab_size - 9) + 5 for place in range(length)]
    sampling = Sampling(max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=1)
    return Ask(prompt, sampling, LoopBounds(min_loops=1, exit_threshold=0.5))


def _serve(engine: Engine, asks: list[Ask]) -> list[Outcome]:
    serving = Serving(engine)
    rids = [serving.submit(ask) for ask in asks]
    serving.run()
    return [serving.outcomes[rid] for rid in rids]
