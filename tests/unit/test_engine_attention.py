"""CPU attention over the paged pool: close to exact arithmetic, and the same bits however rows are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels.attention import attend_plain
from epicycle.engine.kernels.tiled import TiledOps, Tiling, can_pack
from epicycle.engine.pool import KvPool
from epicycle.engine.rows import RowLayout, TickRows
from epicycle.engine.selfcheck import choose_ops
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout
from tests.fakes.tiny_models import HUGINN, NANBEIGE, OURO, spec_of

LAYERS, LOOPS, WIDTH = 3, 4, 16
FIRST, RECURRENT = 1, 1


def make_pool(kv_heads: int = 2, dtype: torch.dtype = torch.float32, pages: int = 40, **layout: object) -> KvPool:
    geometry = KvGeometry(
        layers=LAYERS,
        first_recurrent=FIRST,
        recurrent_layers=RECURRENT,
        loops=LOOPS,
        kv_heads=kv_heads,
        head_dim=WIDTH,
        element_bytes=dtype.itemsize,
        page_tokens=16,
    )
    return KvPool(
        build_layout(str(layout.pop("name", "last_exited")), geometry, **layout), pages, dtype, torch.device("cpu")
    )  # type: ignore[arg-type]


class History:
    """One request's q, k, v at every position, and what attention over them should be."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(tokens, heads, WIDTH, generator=generator).to(dtype)
        self.k, self.v = (torch.randn(tokens, kv_heads, WIDTH, generator=generator).to(dtype) for _ in range(2))

    def expected(self, position: int, dtype: torch.dtype) -> Tensor:
        q, k, v = (x[: position + 1].to(dtype) for x in (self.q, self.k, self.v))
        return attend_plain(q[-1], k, v)


def page_table(requests: int, pages_each: int) -> Tensor:
    """Pages of the requests, scattered over the pool."""
    order = torch.randperm(requests * pages_each, generator=torch.Generator().manual_seed(3))
    return order.view(requests, pages_each).to(torch.int32)


def rows_of(entries: list[tuple[int, int, int, int]], decode_rows: int, padding: int = 0) -> RowLayout:
    """(slot, position, depth, end) of each row."""
    columns = torch.tensor(entries + entries[:1] * padding).T
    return RowLayout(
        slots=columns[0],
        positions=columns[1],
        depths=columns[2],
        noise_seeds=columns[0],
        ends=columns[3],
        decode_rows=decode_rows,
        prompt_rows=len(entries) - decode_rows,
    )


def attend(pool: KvPool, table: Tensor, layout: RowLayout, history: list[History], layer: int = FIRST) -> Tensor:
    picked = [
        [getattr(history[slot], name)[position] for slot, position in zip(layout.slots, layout.positions, strict=True)]
        for name in "qkv"
    ]
    return TickRows(pool, table, layout).attend(layer, *(torch.stack(rows) for rows in picked))


def fill(pool: KvPool, table: Tensor, history: list[History], depth: int = 0) -> None:
    for slot, request in enumerate(history):
        count = len(request.q)
        attend(pool, table, rows_of([(slot, p, depth, count) for p in range(count)], 0), history)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_at_most_twice_those_of_plain_arithmetic(heads: int, dtype: torch.dtype) -> None:
    pool, table = make_pool(dtype=dtype), page_table(3, 10)
    history = [History(tokens, heads, 2, seed, dtype) for seed, tokens in enumerate((150, 64, 17))]
    prompt = rows_of([(slot, p, 2, len(h.q)) for slot, h in enumerate(history) for p in range(len(h.q))], 0)
    whole = attend(pool, table, prompt, history)
    decode = rows_of([(slot, len(h.q) - 1, 2, len(h.q)) for slot, h in enumerate(history)], 3)
    for layout, got in ((prompt, whole), (decode, attend(pool, table, decode, history))):
        pairs = list(zip(layout.slots.tolist(), layout.positions.tolist(), strict=True))
        exact = torch.stack([history[slot].expected(position, torch.float64) for slot, position in pairs])
        plain = torch.stack([history[slot].expected(position, dtype) for slot, position in pairs])
        assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_a_decode_row_has_the_same_bits_in_any_company() -> None:
    pool, table = make_pool(), page_table(4, 10)
    history = [History(tokens, 4, 2, seed) for seed, tokens in enumerate((150, 1, 64, 65))]
    fill(pool, table, history)
    entries = [(slot, len(h.q) - 1, 0, len(h.q)) for slot, h in enumerate(history)]
    alone = [attend(pool, table, rows_of([entry], 1), history)[0] for entry in entries]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 0]):
        for padding in (0, 3):
            got = attend(pool, table, rows_of([entries[index] for index in order], len(order), padding), history)
            assert all(torch.equal(alone[index], got[place]) for place, index in enumerate(order))
            assert not got[len(order) :].any()


def test_a_prompt_row_has_the_same_bits_in_any_chunk() -> None:
    pool, table = make_pool(), page_table(2, 10)
    history = [History(150, 4, 2, 0), History(40, 4, 2, 1)]
    fill(pool, table, history)
    entries = [(0, p, 0, 150) for p in range(150)]
    whole = attend(pool, table, rows_of(entries, 0), history)
    for size in (1, 3, 16, 64):
        for first in range(0, 150, size):
            end = min(150, first + size)
            chunk = [(0, p, 0, end) for p in range(first, end)]
            other = [(1, p, 0, 21) for p in range(20, 21)]
            got = attend(pool, table, rows_of(other + chunk, 1), history)
            assert torch.equal(whole[first:end], got[1:])


@pytest.mark.parametrize("packed", [True, False])
def test_planes_keep_loops_apart_and_fill_copies_the_last_one(packed: bool) -> None:
    pool, table = make_pool(packed=packed), page_table(1, 2)
    history = [[History(5, 2, 2, depth)] for depth in range(LOOPS)]
    for depth in range(LOOPS):
        attend(pool, table, rows_of([(0, p, depth, 5) for p in range(5)], 0), history[depth])
    # Position 4 leaves after two loops with max_loops 3: plane 1 is copied to plane 2 and to no other.
    one = torch.tensor([4])
    pool.fill_deeper(table[0, :1], one, torch.tensor([2]), torch.tensor([3]))
    for depth in range(LOOPS):
        keys, values = history[depth][0].k.clone(), history[depth][0].v.clone()
        if depth == 2:
            keys[4], values[4] = history[1][0].k[4], history[1][0].v[4]
        cells = pool.cells(table[0, :1].expand(5), torch.full((5,), depth), torch.arange(5)) + pool.layer_cells(FIRST)
        assert torch.equal(keys, pool.k_cells[cells])
        assert torch.equal(values, pool.v_cells[cells])


def test_layers_that_run_once_lie_in_plane_zero() -> None:
    pool, table = make_pool(), page_table(1, 2)
    history = [History(3, 2, 2, 7)]
    rows = TickRows(pool, table, rows_of([(0, p, 3, 3) for p in range(3)], 0))
    got = rows.attend_once(LAYERS - 1, history[0].q, history[0].k, history[0].v)
    assert torch.allclose(got[2], history[0].expected(2, torch.float32), atol=1e-6)
    cells = pool.cells(table[0, :1].expand(3), torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert torch.equal(history[0].k, pool.k_cells[cells + pool.layer_cells(LAYERS - 1)])


@pytest.mark.parametrize("decode_rows", [0, 1])
def test_positions_not_written_are_never_read(decode_rows: int) -> None:
    pool, table = make_pool(), page_table(1, 2)
    pool.poison(torch.arange(pool.pages))
    history = [History(5, 2, 2, 0)]
    fill(pool, table, history)
    entries = [(0, 4, 0, 5)]
    got = attend(pool, table, rows_of(entries, decode_rows), history)
    assert torch.allclose(got[0], history[0].expected(4, torch.float32), atol=1e-6)


@pytest.mark.parametrize("config", [OURO, HUGINN, NANBEIGE], ids=lambda config: str(config["model_type"]))
def test_the_self_check_finds_a_setting(config: dict[str, object]) -> None:
    ops = choose_ops(spec_of(config), torch.float32, 40)
    x = torch.randn(37, 40, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    whole = ops.linear(x, weight)
    assert torch.allclose(whole, x @ weight.T, atol=1e-5)
    assert all(torch.equal(whole[row : row + 1], ops.linear(x[row : row + 1], weight)) for row in range(37))


@pytest.mark.parametrize("tiling", [Tiling(8, is_blocked=True), Tiling(4), Tiling(1, is_packed=True)])
def test_every_tiling_computes_the_same_product(tiling: Tiling) -> None:
    ops = TiledOps(tiling)
    x = torch.randn(21, 48, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(16.0)
    for rows in (21, 8, 1):
        assert torch.allclose(ops.linear(x[:rows], weight, bias), x[:rows] @ weight.T + bias, atol=1e-5)


def test_weights_are_not_copied_for_models_that_fill_the_memory() -> None:
    tiny = spec_of(OURO)
    wide = replace(tiny, vocab_size=1 << 23)
    assert choose_ops(tiny, torch.float32, 8).tiling.is_packed == can_pack(torch.float32)
    assert not choose_ops(wide, torch.float32, 8).tiling.is_packed
    assert not choose_ops(tiny, torch.bfloat16, 8).tiling.is_packed
