"""The transfer port with its own thread: it wakes who waits for it, says what went wrong, and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from epicycle.engine.engine import Engine
from epicycle.engine.transfer.connector import TransferError
from epicycle.engine.transfer.copying import CopyConnector
from epicycle.engine.transfer.events import Ended, Failed
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.port import TransferPort
from epicycle.transport.config import TransferConfig
from epicycle.transport.doorbell import wait_readable
from epicycle.transport.link import Receiver
from epicycle.transport.local_link import LocalFabric
from epicycle.transport.wire.transfer import Import, ToPeer
from tests.fakes.serving import tiny_engine, tiny_folder

LONG_S = 30.0
PART = Import(7, "ex0", 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tiny_folder(tmp_path_factory.mktemp("models"), "ouro"))


@pytest.fixture
def port(engine: Engine) -> Iterator[TransferPort]:
    fabric = LocalFabric()
    receiver = cast("Receiver[ToPeer]", fabric.bind("ex1", 1, "transfer", ToPeer))
    connector = CopyConnector(Memory.of(engine.pool, engine.heads))
    port = TransferPort(connector, "ex1", 1, receiver, TransferConfig(connector="copy"))
    port.start()
    yield port
    port.close()


def test_events_wake_who_waits(port: TransferPort) -> None:
    port.peer_down("ex0", 3)
    port.expect(PART, 5, 0, [0, 1], 0, lambda: True)
    assert wait_readable([port], LONG_S)
    assert [Failed(7, "peer_down", "ex0 is down")] == port.take()
    assert not wait_readable([port], 0.0)
    port.stop(7)
    assert wait_readable([port], LONG_S)
    assert [Ended(7)] == port.take()


def test_a_reset_is_quiet_once_nothing_is_left(port: TransferPort) -> None:
    port.expect(PART, 5, 0, [0, 1], 0, lambda: False)
    port.reset()
    while not port.is_quiet:
        assert wait_readable([port], LONG_S)
        port.take()


def test_what_breaks_its_thread_is_told_to_the_pump(port: TransferPort) -> None:
    def broken() -> bool:
        raise ZeroDivisionError("by the test")

    port.peer_up("ex0", 3, LocalFabric().connect("local:nowhere"))
    port.expect(PART, 5, 0, [0, 1], 0, broken)
    assert wait_readable([port], LONG_S)
    with pytest.raises(TransferError, match="ZeroDivisionError"):
        port.take()


def test_closing_ends_the_thread(port: TransferPort) -> None:
    port.close()
    port.close()
    assert "ex1 transfers" not in [thread.name for thread in threading.enumerate()]
