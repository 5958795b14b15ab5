"""What must be equal on two executors for KV to be exchanged: read off a loaded engine.

Owns the words of `TransferFacts`. Who compares them is the supervisor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epicycle.engine.kernels.products import canonical_chunks
from epicycle.engine.selfcheck import linear_shapes
from epicycle.engine.transfer.blocks import BlockShape, block_shape
from epicycle.transport.config import TransferConfig
from epicycle.transport.wire.transfer import TransferFacts

if TYPE_CHECKING:
    from epicycle.engine.engine import Engine

_BITS = {2: torch.int16, 4: torch.int32}


def weights_checksum(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the weights as they lie on the device: a sum of every tensor's bits under its name. One wait."""
    names = sorted(name for name in tensors if tensors[name].element_size() in _BITS)
    sums = [tensors[name].view(_BITS[tensors[name].element_size()]).sum(dtype=torch.int64) for name in names]
    numbers = torch.stack(sums).tolist() if sums else []
    return hashlib.sha256(repr(list(zip(names, numbers, strict=True))).encode()).hexdigest()[:16]


def facts_of(engine: Engine, config: TransferConfig, fingerprint: str) -> TransferFacts:
    pool, options = engine.pool, engine.options
    facts, geometry = pool.facts, pool.geometry
    packing = "packed" if facts.is_packed else "rectangular"
    return TransferFacts(
        model=f"{engine.files.served_id}, {geometry.loops} loops, start state {options.start_state}",
        weights=fingerprint,
        weights_checksum=engine.weights_checksum,
        dtype=str(pool.k.dtype).removeprefix("torch."),
        layout=f"{facts.name}, {packing}, {facts.page_tokens} tokens a page",
        live_slots=_live_slots(block_shape(facts, geometry, 0)),
        capability=_capability(engine.device),
        torch=str(torch.__version__),
        triton=_triton_version(),
        numerics=_numerics(engine),
        connector=f"nixl {config.nixl_backend}" if config.connector == "nixl" else config.connector,
    )


def _live_slots(shape: BlockShape) -> str:
    """Each distinct (first, count) of planes once: `0+8 8+4..252+4 of 256`."""
    first, *deeper = shape.planes
    words = [f"{first[0]}+{first[1]}"]
    if deeper:
        words.append("..".join(f"{start}+{count}" for start, count in dict.fromkeys((deeper[0], deeper[-1]))))
    return f"{' '.join(words)} of {shape.slots_per_page}"


def _capability(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _numerics(engine: Engine) -> str:
    """The order of sums: of products, and of attention."""
    options, attention = engine.options, engine.attention.line() if engine.attention else ""
    if engine.device.type == "cpu":
        return f"{options.numerics}, {engine.ops_line}, {options.cpu_threads} threads, {attention}"
    chunks = ",".join(
        f"{outputs}x{inputs}/{canonical_chunks(outputs, inputs)}"
        for inputs, outputs in sorted(linear_shapes(engine.spec))
    )
    return f"{options.numerics}, {chunks}, {attention}"
