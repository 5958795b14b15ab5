"""The earliest value on which two copies of a request's KV disagree, whatever their layouts."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kv_copy import KvCopy, TensorPlace, copy_kv, first_different
from epicycle.engine.pool import KvPool
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout

POSITIONS, TABLE = 10, (3, 0, 2)


def filled(*, packed: bool = True, table: tuple[int, ...] = TABLE) -> tuple[KvPool, tuple[int, ...]]:
    """A pool in which every cell of a request says where it belongs."""
    geometry = KvGeometry(
        layers=5, first_recurrent=1, recurrent_layers=3, loops=4, kv_heads=2, head_dim=4, element_bytes=4,
        page_tokens=4,
    )  # fmt: skip
    pool = KvPool(build_layout("last_exited", geometry, packed=packed), 5, torch.float32, torch.device("cpu"))
    for plane in range(4):
        for layer in range(1, 4) if plane else range(5):
            for position in range(POSITIONS):
                cell = cell_of(pool, table, plane, layer, position)
                pool.k_cells[cell] = float(position * 100 + plane * 10 + layer)
                pool.v_cells[cell] = -float(position * 100 + plane * 10 + layer)
    return pool, table


def cell_of(pool: KvPool, table: tuple[int, ...], plane: int, layer: int, position: int) -> int:
    page, offset = torch.tensor([table[position // 4]]), torch.tensor([position % 4])
    return int(pool.cells(page, torch.tensor([plane]), offset)) + pool.layer_cells(layer)


def copied(pool: KvPool, table: tuple[int, ...]) -> KvCopy:
    return copy_kv(pool, table, POSITIONS)


def test_equal_kv_in_other_pages_and_another_layout_is_equal() -> None:
    other = filled(packed=False, table=(1, 4, 0))
    assert first_different(copied(*filled()), copied(*other)) is None


@pytest.mark.parametrize("packed", [True, False])
def test_the_earliest_value_is_found_in_the_order_of_computation(packed: bool) -> None:
    pool, table = filled(packed=packed)
    pool.k_cells[cell_of(pool, table, 0, 4, 7)] += 1
    pool.v_cells[cell_of(pool, table, 2, 3, 6)] += 1
    pool.v_cells[cell_of(pool, table, 2, 2, 6)] += 1
    pool.k_cells[cell_of(pool, table, 0, 0, 9)] += 1
    found = first_different(copied(*filled()), copied(pool, table))
    assert TensorPlace(6, 2, 2, "V") == found
    assert "V of layer 2 in plane 2 at position 6" == str(found)


def test_a_zero_of_another_sign_differs() -> None:
    pool, table = filled()
    cell = cell_of(pool, table, 0, 0, 0)
    assert 0.0 == pool.k_cells[cell][0, 0]
    pool.k_cells[cell] = -0.0
    assert TensorPlace(0, 0, 0, "K") == first_different(copied(*filled()), copied(pool, table))


def test_what_lies_behind_the_shorter_one_is_not_compared() -> None:
    pool, table = filled()
    pool.k_cells[cell_of(pool, table, 0, 0, 9)] += 1
    assert first_different(copy_kv(pool, table, 9), copied(*filled())) is None
