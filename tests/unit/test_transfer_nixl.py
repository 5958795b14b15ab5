"""The NIXL connector on host memory: two agents of one process, with the protocol turned by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.errors import EngineError
from epicycle.engine.transfer import nixl
from epicycle.engine.transfer.connector import TransferError
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.nixl import NixlConnector
from epicycle.engine.transfer.units import segments
from epicycle.transport.config import TransferConfig
from epicycle.transport.wire.transfer import Meet, Region
from tests.fakes.serving import serve_all, tiny_engine, tiny_folder
from tests.fakes.split import Split
from tests.unit.test_transfer_split import asks

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in nixl.MODULES), reason="NIXL isn't installed"
)
MANY_STEPS = 400_000  # its own threads carry the bytes, and nobody waits for them here


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder = tiny_folder(tmp_path_factory.mktemp("models"), "huginn_raven")
    return tiny_engine(folder, poison=True), tiny_engine(folder, poison=True)


@pytest.fixture
def pair(engines: tuple[Engine, Engine]) -> Iterator[tuple[NixlConnector, NixlConnector]]:
    made = [
        NixlConnector(Memory.of(engine.pool, engine.heads), name, 1)
        for engine, name in zip(engines, ("ex0", "ex1"), strict=True)
    ]
    yield made[0], made[1]
    for connector in made:
        connector.close()


def test_split_equals_local(engines: tuple[Engine, Engine], pair: tuple[NixlConnector, NixlConnector]) -> None:
    page = engines[0].pool.facts.page_bytes
    limits = TransferConfig(connector="nixl", chunk_bytes=page, inflight_bytes=2 * page)
    expected = serve_all(engines[1], asks())
    split = Split(*engines, limits, pair)
    rids = [split.submit(ask) for ask in asks()]
    split.run(MANY_STEPS)
    assert [outcome.bits for outcome in expected] == [split.d.outcomes[rid].bits for rid in rids]
    counters = split.p.port.counters()
    assert len(rids) == counters['transfer_sent_total{executor="ex0"}']
    assert 0 == counters['transfer_inflight_bytes{executor="ex0"}']
    assert counters['transfer_link_bytes_per_second{executor="ex0",peer="ex1"}'] > 0


def test_a_write_lands_where_it_was_told_to_and_brings_its_tag(
    engines: tuple[Engine, Engine], pair: tuple[NixlConnector, NixlConnector]
) -> None:
    here, there = pair
    blocks = here.connect(there.meet("ex1", 1))
    source = here.blocks.whole(np.array([1, 2]), np.array([0, 1]))
    target = blocks.whole(np.array([5, 3]), np.array([0, 1]))
    engines[0].pool.k.copy_(torch.arange(engines[0].pool.k.numel(), dtype=torch.float32).view_as(engines[0].pool.k))
    write = here.write("ex1", source, target, b"tag")
    while not write.is_done():
        pass
    write.release()
    tags: list[bytes] = []
    while not tags:
        tags = there.arrived()
    assert [b"tag"] == tags
    sent, got = Memory.of(engines[0].pool, engines[0].heads), Memory.of(engines[1].pool, engines[1].heads)
    for start, to, size in zip(*segments(source, target, here.blocks, blocks), strict=True):
        assert torch.equal(sent.bytes_at(int(start), int(size)), got.bytes_at(int(to), int(size)))


def test_memory_that_nobody_registered_is_refused(pair: tuple[NixlConnector, NixlConnector]) -> None:
    here, there = pair
    meet = there.meet("ex1", 1)
    regions = [Region(region.name, region.address + (1 << 40), region.bytes) for region in meet.regions]
    with pytest.raises(TransferError, match="no way to ex1"):
        here.connect(Meet("ex1", 1, meet.agent, meet.memory, meet.device, regions))


def test_without_nixl_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("not_nixl", "nor_this"))
    with pytest.raises(EngineError, match=r"not_nixl, nor_this.*pip install 'epicycle\[nixl\]'"):
        nixl.find_nixl()


def test_an_unknown_backend_is_refused(engines: tuple[Engine, Engine]) -> None:
    with pytest.raises(EngineError, match="NOSUCH"):
        NixlConnector(Memory.of(engines[0].pool, engines[0].heads), "ex9", 1, "NOSUCH")
