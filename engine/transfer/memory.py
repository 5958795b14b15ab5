"""The memory that an executor exchanges: its pool and head rows, as addresses, and as bytes to copy.

Owns the reading of tensors' addresses. It must not know blocks' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.heads import HeadRows
from epicycle.engine.pool import KvPool
from epicycle.engine.transfer.blocks import Blocks, block_shape
from epicycle.transport.wire.transfer import Region


@dataclass(frozen=True, slots=True)
class Memory:
    """Tensors by region name, each one allocation."""

    tensors: dict[str, Tensor]
    blocks: Blocks

    @classmethod
    def of(cls, pool: KvPool, heads: HeadRows) -> Memory:
        tensors = {"k": pool.k, "v": pool.v, "heads": heads.tensor}
        spans = {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors.items()}
        shape = block_shape(pool.facts, pool.geometry, heads.tensor[0].nbytes)
        return cls(tensors, Blocks(shape, spans["k"], spans["v"], spans["heads"]))

    @property
    def device(self) -> torch.device:
        return self.tensors["k"].device

    @property
    def kind(self) -> str:
        return "VRAM" if self.device.type == "cuda" else "DRAM"

    @property
    def device_number(self) -> int:
        return self.device.index or 0

    def enter(self) -> None:
        """Make the memory's device the calling thread's."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device_number)
            torch.cuda.current_stream().synchronize()  # the context is there only once something has used it

    def regions(self) -> list[Region]:
        return [Region(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in self.tensors.items()]

    def bytes_at(self, address: int, size: int) -> Tensor:
        """[size] uint8 view of memory that lies in one region."""
        for tensor in self.tensors.values():
            at = address - tensor.data_ptr()
            if at >= 0 and at + size <= tensor.nbytes:
                return tensor.view(-1).view(torch.uint8)[at : at + size]
        raise AssertionError(f"{size} bytes at {address:#x} are in no region")
