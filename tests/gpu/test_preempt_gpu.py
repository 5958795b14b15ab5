"""Rows that leave a GPU and come back have the bits of solo runs; copies of pages arrive in order, nobody waits."""

from __future__ import annotations

import json
import time

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.host_pages import Copies, StreamMover
from epicycle.tools import verify
from epicycle.transport.config import EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]
ARRIVAL_S = 30.0


@pytest.mark.parametrize("model", ["embedded:ouro", "embedded:huginn"])
def test_preempted_and_resumed_equal_solo_runs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, "--device", "cuda", "--trials", "16", "--outputs", "16", "--longest-prompt", "200"]
    assert 0 == verify.main([*words, "--conditions", "preempted", "resumed"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 16 == report["trials"]
    assert min(report["preemptions"].values()) > 0


def arrive(mover: StreamMover, copies: Copies) -> None:
    deadline_s = time.monotonic() + ARRIVAL_S
    while not copies.is_complete():
        assert time.monotonic() < deadline_s, "the copies never arrive"
        mover.advance()


def test_pages_travel_there_and_back_behind_what_was_launched_before() -> None:
    engine = Engine.load(EngineConfig(slots=2, context_tokens=256, device="cuda"))
    pool, mover = engine.pool, engine._mover
    assert isinstance(mover, StreamMover)
    pages, host_pages, targets = [1, 5, 3, 0], [2, 0, 3, 1], [9, 7, 8, 6]
    for held in (pool.k, pool.v):
        held.normal_()
    expected = [pool.pages_of(held)[pages].clone() for held in (pool.k, pool.v)]
    saved = mover.save(pages, host_pages)
    arrive(mover, saved)
    for held in (pool.k, pool.v):
        pool.pages_of(held)[pages + targets] = float("nan")
    arrive(mover, mover.load(host_pages, targets))
    for held, wanted in zip((pool.k, pool.v), expected, strict=True):
        assert torch.equal(wanted, pool.pages_of(held)[targets])


@pytest.mark.parametrize("count", [3, 40], ids=["staged", "more than is staged"])
def test_spilled_pages_may_be_written_at_once(count: int) -> None:
    engine = Engine.load(EngineConfig(slots=2, context_tokens=2048, device="cuda", host_prefix_bytes=64 << 20))
    pool, mover = engine.pool, engine._mover
    assert isinstance(mover, StreamMover)
    pages, targets = list(range(count)), list(range(count, 2 * count))
    host_pages = [engine.capabilities().host_pages + page for page in pages]
    for held in (pool.k, pool.v):
        held.normal_()
    expected = [pool.pages_of(held)[pages].clone() for held in (pool.k, pool.v)]
    spilled = mover.spill(pages, host_pages)
    for held in (pool.k, pool.v):
        pool.pages_of(held)[pages] = float("nan")
    arrive(mover, mover.load(host_pages, targets))
    assert spilled.is_complete()
    for held, wanted in zip((pool.k, pool.v), expected, strict=True):
        assert torch.equal(wanted, pool.pages_of(held)[targets])
