"""More rows that decode at once than verify's default conditions had for long: launches of 65 to 128 rows begin early,
and no row's bits may show it."""

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
REQUESTS, COMPARED, TIMES = 120, 12, 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with large_engine(128, 256) as made:
        yield made


@pytest.mark.parametrize("is_fixed", [True, False], ids=["whole tokens", "a loop a tick"])
def test_their_bits_are_those_they_have_alone_every_time(engine: Engine, is_fixed: bool) -> None:
    asks = [_ask(engine, number, is_fixed=is_fixed) for number in range(REQUESTS)]
    compared = range(0, REQUESTS, REQUESTS // COMPARED)
    alone = [outcome.bits for outcome in serve_alone(engine, [asks[number] for number in compared])]
    for time in range(TIMES):
        together = serve_all(engine, asks)
        differ = [number for number, bits in zip(compared, alone, strict=True) if together[number].bits != bits]
        assert not differ, f"requests {differ} differ in company, the {time + 1}. time"


def _ask(engine: Engine, number: int, *, is_fixed: bool) -> Ask:
    length = 5 + 7 * number % 61
    prompt = [(11 * number + 17 * place * (number + 1)) % (engine.spec.vocab_size - 9) + 5 for place in range(length)]
    loops = LoopBounds(exit_threshold=1.0) if is_fixed else LoopBounds(min_loops=1, exit_threshold=0.5)
    return Ask(prompt, Sampling(max_tokens=48, temperature=0.0, logprobs=1), loops)
