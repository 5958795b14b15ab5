"""The NIXL connector: writes straight from one executor's pool into another's, through NIXL and UCX.

Owns the agent, the registered memory and a prepared list of blocks for every peer, made once. The backend is created
with `ucx_error_handling_mode` none, since the default mode leaves out shared-memory lanes inside a node; that a peer
is gone is for its sentinel to say. NIXL merges blocks that follow each other on both sides, in the order given.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from epicycle.engine.errors import EngineError
from epicycle.engine.transfer.blocks import Blocks, Numbers
from epicycle.engine.transfer.connector import TransferError, blocks_of
from epicycle.engine.transfer.memory import Memory
from epicycle.transport.wire.transfer import Meet

MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_LOCAL = "NIXL_INIT_AGENT"


def find_nixl() -> ModuleType:
    """NIXL's Python interface, whichever build is installed. Raises EngineError where none is."""
    for name in MODULES:
        try:
            module = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # whatever the build is called
        return module
    raise EngineError(
        "no_nixl",
        f"transfer.connector is nixl and none of {', '.join(MODULES)} can be imported: "
        "pip install 'epicycle[nixl]', or nixl-cu12 for CUDA 12",
    )


def agent_errors(api: ModuleType) -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """(every error of the agent, those that mean that the peer is gone)."""
    named = {name: getattr(api.nixlBind, name) for name in dir(api.nixlBind) if name.endswith("Error")}
    gone = (named["nixlRemoteDisconnectError"], named["nixlNotFoundError"])
    return (*named.values(), RuntimeError, ValueError), gone


@dataclass(slots=True)
class _Peer:
    agent: str
    prepared: Any
    blocks: Blocks


class NixlWrite:
    """Meets `connector.Write`."""

    def __init__(self, connector: NixlConnector, handle: Any, state: str) -> None:
        self._connector = connector
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        if self._state == "PROC":
            self._state = self._connector.ask(self._handle)
        if self._state == "ERR":
            raise TransferError("transfer_error", "NIXL reports an error for a write")
        return self._state == "DONE"

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._connector.release(handle)


class NixlConnector:
    """Meets `Connector`. `backend` is a NIXL plugin's name; `options` go to it as they are."""

    def __init__(self, memory: Memory, name: str, epoch: int, backend: str = "UCX") -> None:
        self.blocks = memory.blocks
        self._memory = memory
        self._api = find_nixl()
        self._errors, self._gone = agent_errors(self._api)
        self._backends = [backend]
        self._peers: dict[str, _Peer] = {}
        self._agent = self._api.nixl_agent(f"{name}.e{epoch}.{os.getpid()}", self._api.nixl_agent_config(backends=[]))
        options = {"ucx_error_handling_mode": "none"} if backend == "UCX" else {}
        try:
            self._agent.create_backend(backend, options)
            self._registered = [
                self._agent.register_memory(tensor, backends=self._backends) for tensor in memory.tensors.values()
            ]
        except self._errors as error:
            raise EngineError("no_nixl", f"NIXL's backend {backend} can't serve the KV pool: {error}") from error
        self._prepared = self._prepare(_LOCAL, memory.blocks, memory.kind, memory.device_number)
        self._is_open = True

    def enter(self) -> None:
        self._memory.enter()

    def meet(self, name: str, epoch: int) -> Meet:
        memory, metadata = self._memory, self._agent.get_agent_metadata()
        return Meet(name, epoch, metadata, memory.kind, memory.device_number, memory.regions())

    def connect(self, meet: Meet) -> Blocks:
        self.disconnect(meet.name)
        blocks = blocks_of(self.blocks, meet)
        try:
            found = self._agent.add_remote_agent(meet.agent)
            agent = found.decode() if isinstance(found, bytes) else found
            self._agent.make_connection(agent, self._backends)
            prepared = self._prepare(agent, blocks, meet.memory, meet.device)
        except self._errors as error:
            raise TransferError("transfer_error", f"no way to {meet.name} e{meet.epoch}: {error}") from error
        self._peers[meet.name] = _Peer(agent, prepared, blocks)
        return blocks

    def _prepare(self, agent: str, blocks: Blocks, memory: str, device: int) -> Any:
        address, size, distance, count = blocks.rows.T
        rows = np.stack((address, size, np.full_like(address, device), distance, count), axis=1).astype(np.uint64)
        return self._agent.prep_xfer_dlist(agent, np.ascontiguousarray(rows), memory, self._backends)

    def disconnect(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        for forget, what in ((self._agent.release_dlist_handle, peer.prepared), (self._forget, peer.agent)):
            try:
                forget(what)
            except self._errors:  # a dead peer may be forgotten already
                continue

    def _forget(self, agent: str) -> None:
        self._agent.remove_remote_agent(agent)

    def write(self, peer: str, source: Numbers, target: Numbers, tag: bytes) -> NixlWrite:
        to, handle = self._peers[peer], None
        here, there = source.astype(np.int32), target.astype(np.int32)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", self._prepared, here, to.prepared, there, tag, self._backends
            )
            return NixlWrite(self, handle, self._agent.transfer(handle))
        except self._errors as error:
            if handle is not None:
                self.release(handle)
            if isinstance(error, self._gone):
                raise TransferError("peer_down", f"{peer} is gone: {error}") from error
            raise TransferError("transfer_error", f"a write to {peer} of {len(here)} blocks failed: {error}") from error

    def ask(self, handle: Any) -> str:
        """The state of a posted write. Raises TransferError."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except self._gone as error:
            raise TransferError("peer_down", f"a peer is gone: {error}") from error
        except self._errors as error:
            raise TransferError("transfer_error", f"a write failed: {error}") from error

    def release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors:  # of a dead peer, and cancelled already
            return

    def arrived(self) -> list[bytes]:
        try:
            found = self._agent.get_new_notifs(self._backends)
        except self._errors:  # of a peer that has died; its sentinel says so
            return []
        return [tag for tags in found.values() for tag in tags]

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for name in list(self._peers):
            self.disconnect(name)
        self._agent.release_dlist_handle(self._prepared)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
