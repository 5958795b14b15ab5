"""Matrix products against float32, at tile edges, with every epilogue."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels.gemm_triton import added_parts, plain_product, product
from epicycle.engine.kernels.products import GemmConfig
from tests.fakes.paged import relative_error

STREAM = GemmConfig("stream", 16, 32, 64, 4, 3)
SHARED = GemmConfig("stream", 16, 32, 64, 4, 3, shares=4)
TILE = GemmConfig("tile", 64, 32, 64, 4, 3)
SHAPES = ((1, 256, 64), (5, 160, 96), (33, 528, 80))
CASES = [(STREAM, "plain", 1), (STREAM, "plain", 4), (STREAM, "pair", 1), (STREAM, "float", 1), (STREAM, "parts", 4)]
CASES += [(SHARED, "plain", 1), (SHARED, "pair", 1), (SHARED, "parts", 4)]
CASES += [(TILE, "plain", 1), (TILE, "plain", 4), (TILE, "pair", 1)]


def inputs(rows: int, width: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, width).to(dtype), (torch.randn(outputs, width) * width**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("config", "epilogue", "chunks"), CASES, ids=[f"{c.key}-{e}-{n}" for c, e, n in CASES])
def test_products_err_at_most_twice_as_much_as_plain_torch(
    config: GemmConfig, epilogue: str, chunks: int, dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        x, weight = inputs(*shape, dtype)
        exact = plain_product(x.double(), weight.double(), epilogue=epilogue, chunks=chunks)
        plain = plain_product(x, weight, epilogue=epilogue, chunks=chunks)
        actual = product(x, weight, config, epilogue=epilogue, chunks=chunks)
        assert plain.shape == actual.shape and plain.dtype == actual.dtype
        assert relative_error(actual, exact) <= 2 * relative_error(plain, exact) + 1e-6


def test_parts_added_later_are_the_chunks_added_in_the_kernel() -> None:
    x, weight = inputs(5, 1056, 96, torch.float16)
    parts = product(x, weight, STREAM, epilogue="parts", chunks=4)
    assert torch.equal(product(x, weight, STREAM, chunks=4), added_parts(parts, torch.float16))


def test_a_bias_is_added_before_rounding() -> None:
    x, weight = inputs(5, 160, 96, torch.float16)
    bias = torch.randn(96).half()
    expected = plain_product(x, weight, bias=bias)
    torch.testing.assert_close(product(x, weight, STREAM, bias=bias), expected, atol=1e-3, rtol=1e-3)


def test_rows_are_read_through_an_index() -> None:
    x, weight = inputs(33, 160, 96, torch.float32)
    index = torch.tensor([4, 31, 4, 0], dtype=torch.int32)
    expected = product(x[index.long()].contiguous(), weight, STREAM)
    assert torch.equal(expected, product(x, weight, STREAM, rows=index))


@pytest.mark.parametrize("config", [STREAM, TILE], ids=["stream", "tile"])
@pytest.mark.parametrize("live", [0, 3])
def test_rows_from_the_device_count_on_cost_nothing_that_shows(config: GemmConfig, live: int) -> None:
    x, weight = inputs(33, 160, 96, torch.float32)
    out = torch.full((33, 96), 5.0)
    product(x, weight, config, count=torch.tensor([live], dtype=torch.int32), out=out)
    assert torch.equal(product(x, weight, config)[:live], out[:live])
    assert live > 0 or bool((out == 5.0).all())


def test_inputs_may_be_a_strided_view() -> None:
    x, weight = inputs(5, 320, 96, torch.float32)
    view, narrow = x[:, :160], weight[:, :160].contiguous()
    for config in (STREAM, TILE):
        assert torch.equal(product(view.contiguous(), narrow, config), product(view, narrow, config))
