"""Rotation, KV writes, decode and prompt attention over a paged pool that is NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels.decode_attention_triton import allocate_scratch, decode_attention, plain_decode_attention
from epicycle.engine.kernels.prompt_attention_triton import plain_prompt_attention, prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, plain_rope_kv, rope_kv
from epicycle.engine.kernels.runs_triton import Runs, allocate_runs, fill_runs
from epicycle.engine.kernels.spans import pack_spans, span_columns
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places, plain_turned
from epicycle.engine.kernels.work_triton import allocate_work, list_tiles, plain_tiles
from tests.fakes.paged import PAGE_TOKENS, Paged, equal, paged, relative_error

CPU = torch.device("cpu")
LAYER = 1
PIECE = 16
HEADS = [(4, 4, 32, False), (6, 2, 16, False), (3, 3, 24, True), (3, 3, 48, True)]
IDS = ["mha", "gqa", "pairs", "two blocks"]
SLOTS, LENGTHS, PLANES = (0, 1, -1, 2, 3), (37, 3, 1, 16, 33), (0, 2, 0, 3, 2)


def decode_case(heads: int, kv_heads: int, width: int, pairs: bool) -> tuple[Paged, RowAddresses, Turning, Tensor]:
    torch.manual_seed(heads)
    pool = paged(heads, kv_heads, width, torch.float16)
    rows = pool.rows(SLOTS, [length - 1 for length in LENGTHS], PLANES)
    for slot, length, plane in zip(SLOTS, LENGTHS, PLANES, strict=True):
        if slot >= 0:
            pool.remember(slot, plane, length - 1, LAYER)
    qkv = torch.randn(len(SLOTS), (heads + 2 * kv_heads) * width).half()
    return pool, rows, pool.turning(pairs), qkv


def work_of(rows: RowAddresses, kv_heads: int, programs: int, length: int) -> Runs:
    work = allocate_runs(20, CPU)
    fill_runs(work, torch.where(rows.slots >= 0, rows.positions + 1, 0).int(), PIECE, programs, kv_heads, length=length)
    return work


def decode(
    pool: Paged,
    rows: RowAddresses,
    q: Tensor,
    turning: Turning | None = None,
    *,
    length: int = 1,
    programs: int = 8,
    tile: int = 16,
) -> Tensor:
    """By that many programs, in runs of `length` pieces; 0 for what suits."""
    scratch = allocate_scratch(20, len(rows.slots), pool.heads, pool.kv_heads, pool.width, CPU)
    out = torch.zeros(len(rows.slots), pool.heads * pool.width, dtype=q.dtype)
    work = work_of(rows, pool.kv_heads, programs, length)
    common = (q, pool.heads, rows, work, scratch, pool.k, pool.v, LAYER)
    decode_attention(*common, turning=turning, out=out, piece=PIECE, tile=tile)
    assert not bool(scratch.tickets.any())
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "width", "pairs"), HEADS, ids=IDS)
def test_rotation_and_cells_are_the_twins(heads: int, kv_heads: int, width: int, pairs: bool) -> None:
    pool, rows, turning, qkv = decode_case(heads, kv_heads, width, pairs)
    expected_k, expected_v = pool.k.clone(), pool.v.clone()
    expected = plain_rope_kv(qkv, heads, turning, rows, expected_k, expected_v, LAYER)
    actual = rope_kv(qkv, heads, turning, rows, pool.k, pool.v, LAYER, out=torch.zeros_like(expected))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(pool.k, expected_k, atol=1e-3, rtol=1e-3, equal_nan=True)
    assert equal(expected_v, pool.v)


def test_rows_that_turn_where_they_are_multiplied_go_where_the_twin_puts_them() -> None:
    pool, rows, turning, qkv = decode_case(4, 2, 16, False)
    expected_k, expected_v = pool.k.clone(), pool.v.clone()
    expected = plain_rope_kv(qkv, 4, turning, rows, expected_k, expected_v, LAYER)
    q = torch.zeros_like(expected)
    plain_turned(qkv, TurnedRows(q, pool.k, pool.v, find_places(rows, turning, PAGE_TOKENS), LAYER))
    assert torch.equal(expected, q)
    assert equal(expected_k, pool.k) and equal(expected_v, pool.v)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "pairs"), HEADS, ids=IDS)
def test_decode_errs_at_most_twice_as_much_as_plain_torch(heads: int, kv_heads: int, width: int, pairs: bool) -> None:
    pool, rows, turning, qkv = decode_case(heads, kv_heads, width, pairs)
    q = plain_rope_kv(qkv, heads, turning, rows, pool.k, pool.v, LAYER)
    exact = plain_decode_attention(q.float(), heads, rows, pool.k.float(), pool.v.float(), LAYER)
    plain = plain_decode_attention(q, heads, rows, pool.k, pool.v, LAYER)
    assert relative_error(decode(pool, rows, q), exact) <= 2 * relative_error(plain, exact) + 1e-6


@pytest.mark.parametrize(("heads", "kv_heads", "width", "pairs"), HEADS, ids=IDS)
def test_rotation_inside_attention_changes_no_bit(heads: int, kv_heads: int, width: int, pairs: bool) -> None:
    pool, rows, turning, qkv = decode_case(heads, kv_heads, width, pairs)
    other = replace(pool, k=pool.k.clone(), v=pool.v.clone())
    q = rope_kv(qkv, heads, turning, rows, pool.k, pool.v, LAYER)
    expected = decode(pool, rows, q)
    assert torch.equal(expected, decode(other, rows, qkv, turning))
    assert equal(pool.k, other.k) and equal(pool.v, other.v)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 32), (2, 1, 24)])
def test_any_number_of_pieces_is_added_up(heads: int, kv_heads: int, width: int) -> None:
    torch.manual_seed(heads)
    lengths = (2, 15, 16, 17, 32, 33, 34, 47)  # pieces of two positions: up to a block of eight, two, three
    pool = paged(heads, kv_heads, width, torch.float32, len(lengths))
    for slot, length in enumerate(lengths):
        pool.remember(slot, 0, length, LAYER)
    rows = pool.rows(range(len(lengths)), [length - 1 for length in lengths], [0] * len(lengths))
    q = torch.randn(len(lengths), heads * width)
    work, scratch = allocate_runs(sum(lengths), CPU), allocate_scratch(sum(lengths), 8, heads, kv_heads, width, CPU)
    fill_runs(work, rows.positions + 1, 2, 8, kv_heads, length=64)
    actual = decode_attention(q, heads, rows, work, scratch, pool.k, pool.v, LAYER, piece=2, tile=2)
    expected = plain_decode_attention(q.double(), heads, rows, pool.k.double(), pool.v.double(), LAYER)
    for row, length in enumerate(lengths):
        assert relative_error(actual[row], expected[row]) < 1e-6, length


@pytest.mark.parametrize(("length", "programs"), [(2, 8), (4, 3), (0, 8), (0, 6), (0, 4), (0, 2), (0, 1)])
def test_how_rows_are_cut_in_runs_changes_no_bit(length: int, programs: int) -> None:
    pool, rows, turning, qkv = decode_case(6, 2, 16, False)
    cut = decode(pool, rows, qkv, turning, length=length, programs=programs)
    assert torch.equal(decode(pool, rows, qkv, turning), cut)


def test_a_decode_row_alone_has_the_bits_it_has_in_company() -> None:
    pool, rows, turning, qkv = decode_case(4, 4, 32, False)
    together = decode(pool, rows, qkv, turning)
    for row in (0, 1, 3, 4):
        at = slice(row, row + 1)
        one = replace(rows, slots=rows.slots[at], positions=rows.positions[at], plane_slots=rows.plane_slots[at])
        assert torch.equal(together[at], decode(pool, one, qkv[at], turning))


def test_padding_rows_write_nothing() -> None:
    pool, rows, turning, qkv = decode_case(4, 4, 32, False)
    rows = replace(rows, slots=torch.full_like(rows.slots, -1))
    before_k, before_v = pool.k.clone(), pool.v.clone()
    rope_kv(qkv, 4, turning, rows, pool.k, pool.v, LAYER)
    assert not bool(decode(pool, rows, qkv, turning).any())
    assert equal(before_k, pool.k) and equal(before_v, pool.v)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 32), (6, 2, 16), (3, 3, 24)], ids=IDS[:3])
def test_packed_prompts_err_at_most_twice_as_much_as_plain_torch(heads: int, kv_heads: int, width: int) -> None:
    torch.manual_seed(heads)
    pool = paged(heads, kv_heads, width, torch.float16)
    chunks = [(0, 10, 23, 0), (1, 0, 0, 0), (1, 7, 1, 2), (2, 0, 9, 3)]  # slot, first position, rows, plane
    slots = [slot for slot, _, count, _ in chunks for _ in range(count)]
    positions = [first + index for _, first, count, _ in chunks for index in range(count)]
    planes = [plane for _, _, count, plane in chunks for _ in range(count)]
    for slot, first, count, plane in chunks:
        pool.remember(slot, plane, first + count, LAYER)
    rows = pool.rows(slots, positions, planes)
    packed, starts = pack_spans([(first, count) for _, first, count, _ in chunks], 16, CPU)
    assert [[10, 0, 7, 0], [0, 23, 23, 24]] == [starts.tolist(), packed.firsts.tolist()]
    q = torch.randn(len(slots), heads * width).half()
    exact = plain_prompt_attention(q.float(), heads, rows, packed, pool.k.float(), pool.v.float(), LAYER)
    plain = plain_prompt_attention(q, heads, rows, packed, pool.k, pool.v, LAYER)
    actual = prompt_attention(q, heads, rows, packed, pool.k, pool.v, LAYER, tile=16)
    assert relative_error(actual, exact) <= 2 * relative_error(plain, exact) + 1e-6


@pytest.mark.parametrize("sizes", [[0, 1, 16, 17, -1, 3000], [5], [64, 64, 64], [40, 1500, 16, 90]])
def test_tiles_come_in_order_of_where_they_begin(sizes: list[int]) -> None:
    starts = [7, 0, 160, 0, 3, 48][: len(sizes)]
    work = allocate_work(256, CPU)
    work.taken.fill_(3)
    list_tiles(work, *(torch.tensor(column, dtype=torch.int32) for column in (sizes, starts)), 16)
    assert int(work.taken) == 0
    assert [list(entry) for entry in plain_tiles(sizes, starts, 16)] == work.items[: int(work.total)].tolist()


def test_spans_become_columns_one_behind_the_other() -> None:
    slots, positions = span_columns([(7, 1), (0, 3), (5, 0), (2, 2)], CPU)
    assert [0, 1, 1, 1, 3, 3] == slots.tolist()
    assert [7, 0, 1, 2, 2, 3] == positions.tolist()
