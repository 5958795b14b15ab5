"""The start-up check of products: its inputs show an order of summation that rounding would hide; what a card refuses
isn't chosen, and where nothing can be timed the start ends and says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton isn't installed: pip install 'triton>=3.6'")

from epicycle.engine.kernels import product_probe
from epicycle.engine.kernels.candidates import sure
from epicycle.engine.kernels.product_probe import ProductProbe, cancelling
from epicycle.engine.kernels.products import LIBRARY, Product

PLAIN = Product("plain", 64, 64)


def added(x: Tensor, weight: Tensor, order: Tensor) -> Tensor:
    """x times weight transposed in bfloat16, summed in float32 one input after the other."""
    total = torch.zeros(len(x), len(weight))
    for k in order:
        total += x[:, k, None].float() * weight[None, :, k].float()
    return total.bfloat16()


@pytest.mark.parametrize("inputs", [256, 257])
def test_another_order_shows_in_nearly_every_output(inputs: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = cancelling(Product("any", 32, inputs), 8, torch.bfloat16, torch.device("cpu"), generator)
    assert 0.0 == (x.double() @ weight.double().T).abs().max()
    straight, other = torch.arange(inputs), torch.randperm(inputs, generator=generator)
    assert torch.equal(added(x, weight, straight), added(x, weight, straight))
    assert 0.8 < (added(x, weight, straight) != added(x, weight, other)).float().mean()
    ordinary = torch.randn(32, inputs, generator=generator).bfloat16()
    assert 0.1 > (added(x, ordinary, straight) != added(x, ordinary, other)).float().mean()


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ProductProbe:
    """One for which every time fails."""

    def refuse(*given: object) -> float:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(product_probe, "graph_us", refuse)
    made = ProductProbe(16, torch.float32, torch.device("cpu"))
    made._held = PLAIN.name, torch.ones(16, 64), [torch.ones(64, 64)], torch.ones(16, 64)
    return made


def test_what_is_refused_takes_for_ever(probe: ProductProbe) -> None:
    assert float("inf") == probe.time_us(PLAIN, LIBRARY, 16)


def test_the_sure_one_must_have_a_time(probe: ProductProbe) -> None:
    with pytest.raises(RuntimeError, match="no graphs here"):
        probe.time_us(PLAIN, sure(PLAIN), 16)
