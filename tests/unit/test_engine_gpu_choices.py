"""Which products a process checks and times, and when: once each, whatever engines it loads one after the other."""

from __future__ import annotations

import pytest
import torch

gpu = pytest.importorskip("epicycle.engine.gpu", reason="needs Triton")

from epicycle.engine.kernels.candidates import TURNED, sure  # noqa: E402
from epicycle.engine.kernels.ladder import Choices  # noqa: E402
from epicycle.engine.kernels.products import GemmConfig, Product  # noqa: E402
from tests.fakes.tiny_models import OURO, spec_of  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(product, step) of every check so far."""
    found: list[tuple[str, int]] = []

    def check(
        products: list[Product], steps: list[int], dtype: torch.dtype, device: torch.device, *, keeps_bits: bool
    ) -> Choices:
        found.extend((product.name, step) for product in products for step in steps)
        return Choices({(product.name, step): sure(product) for product in products for step in steps})

    monkeypatch.setattr(gpu, "check_products", check)
    monkeypatch.setattr(gpu, "_CHOSEN", {})
    return found


def test_a_second_engine_checks_only_what_the_first_did_not(checked: list[tuple[str, int]]) -> None:
    first, second = Product("first", 64, 32), Product("second", 32, 64)
    choices = gpu._choices([first], [1, 16], torch.bfloat16, CPU, keeps_bits=True)
    assert {("first", 1), ("first", 16)} == set(choices.picked)
    gpu._choices([first, second], [1, 16, 32], torch.bfloat16, CPU, keeps_bits=True)
    assert [("first", 1), ("first", 16), ("first", 32), ("second", 1), ("second", 16), ("second", 32)] == checked


def test_choices_whose_bits_are_free_are_their_own(checked: list[tuple[str, int]]) -> None:
    product = Product("one", 64, 32)
    for keeps_bits in (True, False, False):
        gpu._choices([product], [1], torch.bfloat16, CPU, keeps_bits=keeps_bits)
    assert [("one", 1)] * 2 == checked


def test_another_dtype_is_checked_anew(checked: list[tuple[str, int]]) -> None:
    product = Product("one", 64, 32)
    for dtype in (torch.bfloat16, torch.float16):
        gpu._choices([product], [1], dtype, CPU, keeps_bits=True)
    assert [("one", 1)] * 2 == checked


def test_products_turn_their_rows_at_the_steps_where_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(OURO)
    qkv = gpu.products_of(spec)[0]
    apart = GemmConfig("wide", 128, 256, 64, 8, 3)

    def turned_config(
        product: Product, config: GemmConfig, heads: object, rows: int, dtype: torch.dtype, device: torch.device
    ) -> GemmConfig | None:
        assert (qkv, apart if rows == 2048 else sure(qkv)) == (product, config)
        return TURNED[0] if rows == 2048 else None

    monkeypatch.setattr(gpu, "turned_config", turned_config)
    choices = Choices({(qkv.name, 2048): apart})
    choices.turned = gpu._turned(spec, choices, [512, 2048], torch.bfloat16, CPU)
    assert [None, TURNED[0], TURNED[0], None] == [choices.find_turned(qkv, rows) for rows in (1024, 1025, 2048, 2049)]
    assert apart == choices.find(qkv, 2048)
