"""Which head row belongs to which prompt: found once written, the least recently used gives way, none is lost."""

from __future__ import annotations

from epicycle.kvstore.head_index import HeadIndex

A, B, C, D = b"a", b"b", b"c", b"d"


def written(index: HeadIndex, key: bytes) -> int | None:
    row = index.keep(key)
    index.settle(key, is_written=True)
    return row


def test_a_row_is_found_once_it_is_written() -> None:
    index = HeadIndex(10, 2)
    assert 10 == index.keep(A)
    assert index.find(A) is None
    index.settle(A, is_written=True)
    assert 10 == index.find(A)
    assert index.keep(A) is None, "it has one"


def test_the_least_recently_used_gives_way() -> None:
    index = HeadIndex(0, 2)
    assert [0, 1] == [written(index, A), written(index, B)]
    index.find(A)
    assert 1 == written(index, C)
    assert (0, None, 1) == (index.find(A), index.find(B), index.find(C))


def test_rows_that_are_being_written_stay() -> None:
    index = HeadIndex(0, 2)
    assert [0, 1] == [index.keep(A), index.keep(B)]
    assert index.keep(C) is None
    index.settle(A, is_written=False)
    assert (0, None) == (index.keep(C), index.find(A))


def test_two_prompts_that_are_equal_write_one_row() -> None:
    index = HeadIndex(0, 4)
    assert (0, None) == (index.keep(A), index.keep(A))


def test_after_a_reset_every_row_comes_back() -> None:
    index = HeadIndex(0, 3)
    written(index, A)
    pending = index.keep(B)
    index.reset()
    assert index.find(A) is None
    index.settle(B, is_written=True)
    rows = {index.keep(C), index.keep(D), pending}
    assert {0, 1, 2} == rows


def test_no_rows_keep_nothing() -> None:
    assert HeadIndex(4, 0).keep(A) is None
