"""A prompt computed by one executor and decoded by another gives the bits of one that does both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from epicycle.transport.config import TransferConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.serving import Ask, serve_all, tiny_engine, tiny_folder
from tests.fakes.split import Split, split_all
from tests.fakes.tiny_models import CONFIGS

GREEDY = Sampling(max_tokens=6, temperature=0.0, logprobs=2)
DRAWN = Sampling(max_tokens=6, temperature=0.9, top_p=0.9, seed=5, logprobs=1, presence_penalty=0.5)
EARLY = LoopBounds(min_loops=1, exit_threshold=0.55)
PAGE, CHUNK = 4, 16  # of the tiny engines
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), request.param)


def asks(lengths: Sequence[int] = LENGTHS) -> list[Ask]:
    ways = ((GREEDY, LoopBounds()), (DRAWN, EARLY))
    return [
        Ask([(7 * place + length) % 61 for place in range(length)], *ways[number % 2], noise_seed=length)
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("tick", "layout", "packed"),
    [
        ("eager", "last_exited", True),
        ("eager", "last_exited", False),
        ("device", "last_exited", True),
        ("eager", "shared", True),
        ("device", "budgeted:2", True),
    ],
)
def test_split_equals_local(folder: Path, tick: str, layout: str, packed: bool) -> None:
    options = {"tick": tick, "kv_layout": layout, "pack_recurrent_planes": packed, "poison": True}
    lengths = LENGTHS if layout == "last_exited" else LENGTHS[:4]  # others go position by position
    prefill, decode = tiny_engine(folder, **options), tiny_engine(folder, **options)
    expected = serve_all(decode, asks(lengths))
    actual = split_all(prefill, decode, asks(lengths))
    assert [outcome.bits for outcome in expected] == [outcome.bits for outcome in actual]


def test_planes_leave_before_the_prompts_end(folder: Path) -> None:
    prefill, decode = tiny_engine(folder), tiny_engine(folder)
    split = Split(prefill, decode)
    for ask in asks():
        split.submit(ask)
    split.run()
    counters = split.p.port.counters()
    early, sent = (counters[f'transfer_{what}_bytes_total{{executor="ex0"}}'] for what in ("early", "sent"))
    assert 0 < early < sent


def test_past_the_limit_of_bytes_in_flight(folder: Path) -> None:
    prefill, decode = tiny_engine(folder), tiny_engine(folder)
    unit = decode.pool.facts.page_bytes
    expected = serve_all(decode, asks())
    actual = split_all(prefill, decode, asks(), TransferConfig(chunk_bytes=unit, inflight_bytes=unit))
    assert [outcome.bits for outcome in expected] == [outcome.bits for outcome in actual]
