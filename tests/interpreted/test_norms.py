"""Norms and what is fused with them, against their twins."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kernels.norm_triton import gate_logit, norm, norm_after, plain_norm_after
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.silu_triton import silu_mul

EPS = 1e-6
WIDTHS = (64, 96, 2048)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stage", ["sandwich", "sum"])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("has_next", [False, True], ids=["last", "next"])
def test_stages_round_where_plain_torch_rounds(width: int, stage: str, is_split: bool, has_next: bool) -> None:
    torch.manual_seed(width)
    h, after, before = torch.randn(3, width).half(), torch.rand(width).half(), torch.rand(width).half()
    a = torch.randn(4, 3, width) if is_split else torch.randn(3, width).half()
    expected = plain_norm_after(stage, a, h, after, before if has_next else None, EPS)
    actual = norm_after(stage, a, h, after, before if has_next else None, EPS)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, atol=2e-3, rtol=2e-3)


def test_the_residual_may_change_in_place() -> None:
    torch.manual_seed(0)
    a, h, weight = torch.randn(3, 96).half(), torch.randn(3, 96).half(), torch.rand(96).half()
    expected, _ = norm_after("sandwich", a, h, weight, weight, EPS)
    norm_after("sandwich", a, h, weight, weight, EPS, h_out=h)
    assert torch.equal(expected, h)


def test_a_row_alone_has_the_bits_it_has_in_company() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96).half(), torch.rand(96).half()
    together = norm(x, weight, EPS)
    assert torch.equal(together, torch.cat([norm(x[i : i + 1], weight, EPS) for i in range(5)]))


def test_norm_reads_strided_rows() -> None:
    x, weight = torch.randn(3, 192).half(), torch.rand(96).half()
    assert torch.equal(norm(x[:, :96].contiguous(), weight, EPS), norm(x[:, :96], weight, EPS))


def test_silu_and_gate_meet_plain_torch() -> None:
    torch.manual_seed(0)
    both, plain = torch.randn(3, 400).half(), PlainOps()
    expected = plain.silu_mul(both[:, :200], both[:, 200:])
    torch.testing.assert_close(silu_mul(both[:, :200], both[:, 200:]), expected, atol=2e-3, rtol=2e-3)
    weight, bias = torch.randn(1, 400).half() * 0.05, torch.randn(1).half()
    expected = plain.gate_logit(both.float(), weight.float(), bias.float()).half().float()
    torch.testing.assert_close(gate_logit(both, weight, bias), expected, atol=2e-3, rtol=2e-3)
