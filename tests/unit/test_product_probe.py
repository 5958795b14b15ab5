"""The inputs of the start-up check show an order of summation that rounding would hide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton isn't installed: pip install 'triton>=3.6'")

from epicycle.engine.kernels.product_probe import cancelling
from epicycle.engine.kernels.products import Product


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
