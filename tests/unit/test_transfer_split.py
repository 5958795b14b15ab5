"""A prompt computed by one executor and decoded by another gives the bits of one that does both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from epicycle.engine import handover
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


def test_planes_leave_early_or_whole_pages_late_in_fewer_pieces(folder: Path) -> None:
    prefill, decode = tiny_engine(folder), tiny_engine(folder)
    expected = [outcome.bits for outcome in serve_all(decode, asks())]
    counted = []
    for stream_planes in ("on", "off"):
        split = Split(prefill, decode, TransferConfig(connector="copy", stream_planes=stream_planes))
        rids = [split.submit(ask) for ask in asks()]
        split.run()
        assert expected == [split.d.outcomes[rid].bits for rid in rids]
        counted.append(split.p.port.counters())
    (early, segments), (late, fewer) = (
        (counters['transfer_early_bytes_total{executor="ex0"}'], counters['transfer_segments_total{executor="ex0"}'])
        for counters in counted
    )
    assert late < early
    assert fewer < segments


def p_runs(split: Split, steps: int = 30) -> bool:
    """Whether P launches anything in so many steps without a word from D."""
    before = split.p.pump.counters.ticks
    for _ in range(steps):
        split.p.turn()
    return split.p.pump.counters.ticks > before


@pytest.mark.parametrize("ending", ["acknowledged", "late", "cancelled", "lost"])
def test_on_one_gpu_nothing_follows_a_prompt_until_it_has_been_handed_over(
    folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MOST_QUIET_S", 3600.0)
    prefill, decode = tiny_engine(folder), tiny_engine(folder)
    expected = [outcome.bits for outcome in serve_all(decode, asks())]
    split = Split(prefill, decode, TransferConfig(connector="copy", stream_planes="off"))
    first = split.submit(asks()[0])
    split.admit()
    split.d.turn()  # has reserved
    assert p_runs(split)
    rest = [split.submit(ask) for ask in asks()[1:]]
    split.admit()
    assert not p_runs(split)
    match ending:
        case "late":
            monkeypatch.setattr(handover, "MOST_QUIET_S", 0.0)
            assert p_runs(split)
        case "cancelled":
            split.evict(first)
            assert p_runs(split)
        case "lost":
            split.kill("d")
            assert p_runs(split)
            return
    split.run()
    assert expected[1:] == [split.d.outcomes[rid].bits for rid in rest]


def test_past_the_limit_of_bytes_in_flight(folder: Path) -> None:
    prefill, decode = tiny_engine(folder), tiny_engine(folder)
    unit = decode.pool.facts.page_bytes
    expected = serve_all(decode, asks())
    actual = split_all(prefill, decode, asks(), TransferConfig(chunk_bytes=unit, inflight_bytes=unit))
    assert [outcome.bits for outcome in expected] == [outcome.bits for outcome in actual]
