"""Start-state noise depends on (seed, position, lane) alone and is a truncated normal."""

from __future__ import annotations

from statistics import NormalDist

import torch

from epicycle.engine.kernels import noise
from epicycle.engine.kernels.plain import PlainOps

WIDTH = 96


def draw(seeds: list[int], positions: list[int], width: int = WIDTH) -> torch.Tensor:
    return noise.draw(noise.quantile_table(1.0, 1.0), torch.tensor(seeds), torch.tensor(positions), width)


def test_a_row_has_the_same_bits_in_any_packing() -> None:
    batch = draw([3] * 257, list(range(257)))
    for position in (0, 1, 128, 256):
        assert torch.equal(batch[position], draw([3], [position])[0])
    order = torch.randperm(257, generator=torch.Generator().manual_seed(0)).tolist()
    assert torch.equal(batch[order], draw([3] * 257, order))


def test_a_lane_has_the_same_bits_in_any_width() -> None:
    assert torch.equal(draw([5], [9], 96)[:, :7], draw([5], [9], 7))


def test_seed_and_position_both_change_the_row() -> None:
    rows = draw([0, 0, 1, 1, -1], [0, 1, 0, 1, 0])
    agreements = [(rows[a] == rows[b]).sum().item() for a in range(5) for b in range(a)]
    assert max(agreements) <= 2


def test_known_values_stay() -> None:
    """The generator is part of what a stored prefix means: its values may not drift between versions."""
    expected = [[0.22387830913066864, -0.24230033159255981, -1.068408727645874, 0.3357152044773102]]
    assert expected == draw([42], [7], 4).tolist()


def test_values_follow_the_truncated_normal() -> None:
    values = draw([11] * 512, list(range(512)), 512).flatten()
    normal = NormalDist()
    low = normal.cdf(-noise.BOUND_STD)
    for point in (-2.5, -1.0, -0.3, 0.0, 0.7, 1.9):
        expected = (normal.cdf(point) - low) / (1 - 2 * low)
        assert abs((values < point).double().mean().item() - expected) < 4e-3
    assert values.abs().max().item() < noise.BOUND_STD
    assert abs(values.mean().item()) < 6e-3
    assert abs(values.double().std().item() - 0.98658) < 4e-3


def test_neighbouring_lanes_and_positions_are_uncorrelated() -> None:
    values = draw([0] * 400, list(range(400)), 400).double()
    assert abs((values[:, 1:] * values[:, :-1]).mean().item()) < 0.015
    assert abs((values[1:] * values[:-1]).mean().item()) < 0.015


def test_the_table_is_symmetric_and_scaled() -> None:
    table = noise.quantile_table(0.5, 4.0)
    assert torch.equal(table, -table.flip(0))
    torch.testing.assert_close(table, 2.0 * noise.quantile_table(1.0, 1.0))


def test_the_operation_rounds_once_to_the_model_dtype() -> None:
    table = noise.quantile_table(1.0, 1.0)
    seeds, positions = torch.tensor([1, 2]), torch.tensor([3, 4])
    rows = PlainOps().start_noise(table, seeds, positions, WIDTH, torch.bfloat16)
    assert torch.equal(noise.draw(table, seeds, positions, WIDTH).bfloat16(), rows)
