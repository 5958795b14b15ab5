"""Which connector a configuration names; NIXL is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from epicycle.engine.transfer.connector import Connector
from epicycle.engine.transfer.copying import CopyConnector
from epicycle.engine.transfer.memory import Memory
from epicycle.transport.config import TransferConfig


def _nixl(config: TransferConfig, memory: Memory, name: str, epoch: int) -> Connector:
    from epicycle.engine.transfer.nixl import NixlConnector

    return NixlConnector(memory, name, epoch, config.nixl_backend)


def _copy(config: TransferConfig, memory: Memory, name: str, epoch: int) -> Connector:
    return CopyConnector(memory)


CONNECTORS: dict[str, Callable[[TransferConfig, Memory, str, int], Connector]] = {"nixl": _nixl, "copy": _copy}


def make_connector(config: TransferConfig, memory: Memory, name: str, epoch: int) -> Connector:
    """The connector of `config.connector`, over `memory`. Raises EngineError."""
    return CONNECTORS[config.connector](config, memory, name, epoch)
