"""Prompts of a model as large as those served, in pieces and beside one another: their bits are those they have alone,
every time. Small models' ticks are too short for kernels to get in one another's way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.large_engine import large_engine
from tests.fakes.serving import Ask, serve_all, serve_alone

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
    with large_engine(24, 4096) as made:
        yield made


def test_their_bits_are_those_they_have_alone_every_time(engine: Engine) -> None:
    asks = [_ask(engine, number, length) for number, length in enumerate(LENGTHS)]
    alone = [outcome.bits for outcome in serve_alone(engine, asks)]
    for time in range(TIMES):
        together = [outcome.bits for outcome in serve_all(engine, asks)]
        differ = [length for length, one, other in zip(LENGTHS, alone, together, strict=True) if one != other]
        assert not differ, f"prompts of {differ} tokens differ in company, the {time + 1}. time"


def _ask(engine: Engine, number: int, length: int) -> Ask:
    prompt = [(7 * number + 13 * place * (number + 1)) % (engine.spec.vocab_size - 9) + 5 for place in range(length)]
    sampling = Sampling(max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=1)
    return Ask(prompt, sampling, LoopBounds(min_loops=1, exit_threshold=0.5))
