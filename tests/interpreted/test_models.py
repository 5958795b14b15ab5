"""Whole loops of tiny models through the kernels, held to the CPU's plain operations and attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.models.base import LoopedModel, Rows
from epicycle.engine.models.huginn import HuginnModel
from epicycle.engine.models.ouro import OuroModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.rows import RowLayout, TickRows
from epicycle.engine.triton_rows import TritonRows
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout
from tests.fakes.tiny_models import HUGINN, OURO, lively_weights, spec_of

MakeRows = Callable[[KvPool, Tensor, RowLayout], Rows]
MODELS = {"ouro": (OURO, OuroModel), "huginn_raven": (HUGINN, HuginnModel)}
TABLE = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).to(torch.int32)


def make_pool(spec: ModelSpec) -> KvPool:
    geometry = KvGeometry(
        layers=spec.layers,
        first_recurrent=spec.first_recurrent,
        recurrent_layers=spec.recurrent_layers,
        loops=spec.loops,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
        page_tokens=16,
    )
    return KvPool(build_layout("last_exited", geometry), 12, torch.float32, torch.device("cpu"))


def layout(entries: list[tuple[int, int, int]], decode_rows: int) -> RowLayout:
    """(slot, position, end) of each row, all at depth 0; one row of padding."""
    columns = torch.tensor([*entries, entries[0]]).T
    return RowLayout(
        slots=columns[0],
        positions=columns[1],
        depths=torch.zeros_like(columns[0]),
        noise_seeds=columns[0],
        ends=columns[2],
        decode_rows=decode_rows,
        prompt_rows=len(entries) - decode_rows,
    )


PROMPTS = layout([(0, p, 18) for p in range(18)] + [(1, p, 3) for p in range(3)], 0)
MIXED = layout([(0, 18, 19), (1, 3, 4), *((2, p, 5) for p in range(5))], 2)


def one_loop_of_each(model: LoopedModel, make_rows: MakeRows) -> tuple[Tensor, KvPool]:
    """Two prompts, then two decode rows with a third prompt; the states after one loop, padding left out."""
    pool, states = make_pool(model.spec), []
    for rows in (PROMPTS, MIXED):
        traversal = make_rows(pool, TABLE, rows)
        tokens = (7 * rows.positions + rows.slots) % model.spec.vocab_size
        state, _ = model.loop(model.prelude(tokens, traversal), traversal)
        states.append(state[: rows.live_rows])
    return torch.cat(states), pool


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_through_the_kernels_what_it_computes_on_the_cpu(name: str) -> None:
    config, build = MODELS[name]
    spec = spec_of(config)

    def model(ops: Ops) -> LoopedModel:
        return build(spec, lively_weights(spec), ops)

    expected, expected_pool = one_loop_of_each(model(PlainOps()), TickRows)
    actual, pool = one_loop_of_each(model(TritonOps()), TritonRows)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(pool.k, expected_pool.k, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(pool.v, expected_pool.v, atol=2e-5, rtol=2e-4)
