"""Which program reads which pieces of which row."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kernels.runs_triton import Runs, allocate_runs, fill_runs, plain_runs

PIECE = 16


def filled(sizes: list[int], programs: int, heads: int, share: torch.Tensor | None = None, length: int = 0) -> Runs:
    """In memory that held something else before."""
    work = allocate_runs(sum(-(-max(size, 0) // PIECE) for size in sizes), torch.device("cpu"))
    work.items.fill_(77)
    fill_runs(work, torch.tensor(sizes, dtype=torch.int32), PIECE, programs, heads, share=share, length=length)
    return work


def entries(work: Runs) -> list[tuple[int, ...]]:
    """Those without pieces as five zeros."""
    found = [tuple(entry) for entry in work.items[: int(work.total)].tolist()]
    return [entry if entry[2] else (0, 0, 0, 0, 0) for entry in found]


CASES = [
    pytest.param([37, 3], 12, 3, 1, id="one round as they are"),
    pytest.param([37, 20], 6, 3, 3, id="a row each"),
    pytest.param([PIECE * 8] * 4, 16, 4, 8, id="a row for each group"),
    pytest.param([PIECE * 8 + 1] * 4, 16, 4, 9, id="a piece more is no run of its own"),
    pytest.param([PIECE * 129] * 4, 16, 1, 33, id="not 32, which would leave a fifth run of one piece"),
    pytest.param([PIECE * 500, 0, -1], 2, 1, None, id="longer than runs of one length"),
    pytest.param([PIECE * 9] * 5, 8, 2, None, id="five rows for four groups"),
    pytest.param([PIECE * 9] * 40, 528, 16, None, id="forty rows for thirty-three groups"),
    pytest.param([PIECE * 3, 0, PIECE * 40, 5, 5, 5, PIECE * 2, 0], 9, 3, None, id="short rows in one share"),
    pytest.param([1] * 37, 33, 3, None, id="four pieces a share"),
    pytest.param([PIECE * 17] * 19, 528, 16, None, id="nineteen rows of two thousand"),
    pytest.param([PIECE * 9] * 3, 2, 4, 9, id="fewer programs than heads"),
    pytest.param([0, 0], 8, 2, 1, id="nobody"),
]


@pytest.mark.parametrize(("sizes", "programs", "heads", "run"), CASES)
def test_the_cheaper_cut_is_taken(sizes: list[int], programs: int, heads: int, run: int | None) -> None:
    expected, rounds = plain_runs(sizes, PIECE, programs, heads)
    work = filled(sizes, programs, heads)
    assert expected == entries(work)
    assert min(rounds, work.most * heads) == int(work.programs)
    if run is None:  # shares of one line
        groups, longest = rounds // heads, max(entry[1] + entry[2] for entry in expected)
        loads = [sum(entry[2] for entry in expected[group::groups]) for group in range(groups)]
        assert max(loads) == -(-sum(-(-max(size, 0) // PIECE) for size in sizes) // groups)
        assert longest <= max(-(-size // PIECE) for size in sizes)
    else:
        pieces = [-(-max(size, 0) // PIECE) for size in sizes]
        assert sum(-(-count // run) for count in pieces) == len(expected)
        assert min(run, max(pieces)) == max((entry[2] for entry in expected), default=0)


@pytest.mark.parametrize(("sizes", "programs", "heads", "run"), CASES)
def test_every_piece_is_read_once_and_has_a_place_of_its_own(
    sizes: list[int], programs: int, heads: int, run: int | None
) -> None:
    found = entries(filled(sizes, programs, heads))
    pieces = [-(-max(size, 0) // PIECE) for size in sizes]
    read = [(row, first + at, place + at) for row, first, count, place, _ in found for at in range(count)]
    wanted = [(row, at, sum(pieces[:row]) + at) for row, count in enumerate(pieces) for at in range(count)]
    assert wanted == sorted(read)
    for row in range(len(sizes)):
        own = [entry for entry in found if entry[0] == row and entry[2]]
        assert {len(own)} >= {entry[4] for entry in own}


def test_runs_are_for_the_multiprocessors_that_are_left() -> None:
    sizes, share = [37, 200] * 5, torch.tensor([3, 2], dtype=torch.int32)
    assert plain_runs(sizes, PIECE, 3 * 2, 3) != plain_runs(sizes, PIECE, 3 * 5, 3)
    assert plain_runs(sizes, PIECE, 3 * 2, 3)[0] == entries(filled(sizes, 3, 3, share))


def test_runs_of_one_length_are_cut_as_asked() -> None:
    sizes = [PIECE * 9, 3, PIECE * 4]
    assert plain_runs(sizes, PIECE, 8, 2, length=4)[0] == entries(filled(sizes, 8, 2, length=4))


@pytest.mark.parametrize("length", [1, 127, 500, 1090, 2100, 16448, 60000, 140_001, 1_000_001])
@pytest.mark.parametrize(("programs", "heads"), [(264, 16), (264, 55), (264, 8), (528, 1)])
def test_one_row_has_no_empty_runs(length: int, programs: int, heads: int) -> None:
    found, _ = plain_runs([length], 128, programs, heads)
    assert all(entry[2] for entry in found)
