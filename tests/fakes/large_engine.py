"""An engine of a model as large as those served, for tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.hardware import give_back_memory
from epicycle.transport.config import EngineConfig

GIB_NEEDED, KV_GIB = 24, 14


@contextmanager
def large_engine(slots: int, context_tokens: int) -> Iterator[Engine]:
    """Ouro-1.4B of random weights; its memory is given back afterwards. Skips where too little is free."""
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < GIB_NEEDED << 30:
        pytest.skip(f"{free_bytes >> 30} GiB of GPU memory are free, {GIB_NEEDED} are needed")
    yield Engine.load(
        EngineConfig(
            model="ouro-1.4b",
            weights="random",
            device="cuda",
            slots=slots,
            context_tokens=context_tokens,
            kv_memory_bytes=KV_GIB << 30,
        )
    )
    give_back_memory()
