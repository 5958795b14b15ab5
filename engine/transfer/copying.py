"""The plain twin of the NIXL connector: copies between pools of one process.

Owns the table by which connectors of this process find each other. A write is done when it returns, on the host; on a
GPU when its copies are.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from epicycle.engine.transfer.blocks import Blocks, Numbers
from epicycle.engine.transfer.connector import TransferError, blocks_of
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.units import segments
from epicycle.transport.wire.transfer import Meet

_here: dict[bytes, CopyConnector] = {}
_lock = threading.Lock()
_numbers = iter(range(1, 1 << 62))


class Copied:
    """A write that was done when it was made."""

    def is_done(self) -> bool:
        return True

    def release(self) -> None:
        pass


class CopyConnector:
    """Meets `Connector`."""

    def __init__(self, memory: Memory) -> None:
        self.blocks = memory.blocks
        self._memory = memory
        self._agent = f"copy {next(_numbers)}".encode()
        self._arrived: deque[bytes] = deque()
        self._peers: dict[str, tuple[CopyConnector, Blocks]] = {}
        with _lock:
            _here[self._agent] = self

    def enter(self) -> None:
        self._memory.enter()

    def meet(self, name: str, epoch: int) -> Meet:
        memory = self._memory
        return Meet(name, epoch, self._agent, memory.kind, memory.device_number, memory.regions())

    def connect(self, meet: Meet) -> Blocks:
        with _lock:
            peer = _here.get(meet.agent)
        if peer is None:
            text = f"{meet.name} e{meet.epoch} is not in this process; transfer.connector copy joins executors of one"
            raise TransferError("transfer_error", text)
        blocks = blocks_of(self.blocks, meet)
        self._peers[meet.name] = peer, blocks
        return blocks

    def disconnect(self, name: str) -> None:
        self._peers.pop(name, None)

    @torch.inference_mode()
    def write(self, peer: str, source: Numbers, target: Numbers, tag: bytes) -> Copied:
        other, blocks = self._peers[peer]
        for start, to, size in zip(*segments(source, target, self.blocks, blocks), strict=True):
            other._memory.bytes_at(int(to), int(size)).copy_(self._memory.bytes_at(int(start), int(size)))
        if self._memory.device.type == "cuda":
            torch.cuda.current_stream(self._memory.device).synchronize()
        other._arrived.append(tag)
        return Copied()

    def arrived(self) -> list[bytes]:
        found: list[bytes] = []
        while self._arrived:
            found.append(self._arrived.popleft())
        return found

    def close(self) -> None:
        with _lock:
            _here.pop(self._agent, None)
        self._peers.clear()
