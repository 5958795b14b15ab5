"""The counter-based generator: published known answers, range, independence of shape."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.rng import philox, uniform, words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert expected == tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1)))


def _keys(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(count, dtype=torch.int64)
    return zeros - 5, zeros + 1, torch.arange(count), zeros


def test_uniform_stays_inside_the_unit_interval_and_is_even() -> None:
    values = uniform(*_keys(1 << 16))
    assert torch.float64 == values.dtype
    assert bool(((values >= 0) & (values < 1)).all())
    assert pytest.approx(values.mean().item(), abs=0.005) == 0.5
    assert pytest.approx(values.var().item(), abs=0.002) == 1 / 12


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seed, choice, position, lane = _keys(257)
    together = uniform(seed, choice, position, lane)
    alone = [uniform(seed[i : i + 1], choice[i : i + 1], position[i : i + 1], lane[i : i + 1]) for i in range(257)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("changed", range(4))
def test_every_part_of_the_key_changes_the_number(changed: int) -> None:
    key = [torch.tensor([7]) for _ in range(4)]
    other = list(key)
    other[changed] = torch.tensor([8])
    assert words(*key)[0].item() != words(*other)[0].item()


def test_high_seed_bits_matter() -> None:
    one, high = torch.tensor([1]), torch.tensor([1 - 2**63])
    assert words(one, one, one, one)[0].item() != words(high, one, one, one)[0].item()
