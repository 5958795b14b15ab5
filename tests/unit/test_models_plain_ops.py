"""`PlainOps` rounds where its contract says, in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from epicycle.engine.kernels.plain import PlainOps

OPS = PlainOps()


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_rms_norm_rounds_before_and_after_the_weight() -> None:
    x, weight = bf16(3, 64), bf16(64, seed=1)
    normed = (x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal((normed.float() * weight.float()).bfloat16(), OPS.rms_norm(x, weight, 1e-6))


def test_silu_mul_rounds_the_activation() -> None:
    gate, up = bf16(3, 64), bf16(3, 64, seed=1)
    activated = torch.nn.functional.silu(gate.float()).bfloat16()
    assert torch.equal((activated.float() * up.float()).bfloat16(), OPS.silu_mul(gate, up))


def test_rope_half_rounds_three_times() -> None:
    x, cos, sin = bf16(2, 3, 8), bf16(2, 8, seed=1), bf16(2, 8, seed=2)
    c, s = cos.float()[:, None], sin.float()[:, None]
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1).float()
    expected = ((x.float() * c).bfloat16().float() + (turned * s).bfloat16().float()).bfloat16()
    assert torch.equal(expected, OPS.rope_half(x, cos, sin))


def test_rope_pairs_rounds_once() -> None:
    x, cos, sin = bf16(2, 3, 8), bf16(2, 4, seed=1).float(), bf16(2, 4, seed=2).float()
    a, b, c, s = x[..., 0::2].float(), x[..., 1::2].float(), cos[:, None], sin[:, None]
    actual = OPS.rope_pairs(x, cos, sin)
    assert torch.equal((a * c - b * s).bfloat16(), actual[..., 0::2])
    assert torch.equal((b * c + a * s).bfloat16(), actual[..., 1::2])


def test_embedding_is_scaled_with_one_rounding() -> None:
    table, tokens = bf16(5, 8), torch.tensor([4, 0, 4])
    assert torch.equal((table[tokens].float() * 72.663608).bfloat16(), OPS.embed(table, tokens, 72.663608))
    assert torch.equal(table[tokens], OPS.embed(table, tokens))


def test_gate_and_logits_are_float32_of_rounded_values() -> None:
    x, weight, bias = bf16(3, 64), bf16(1, 64, seed=1), bf16(1, seed=2)
    gate, logits = OPS.gate_logit(x, weight, bias), OPS.logits(x, bf16(7, 64, seed=3))
    assert ((3,), torch.float32, (3, 7), torch.float32) == (gate.shape, gate.dtype, logits.shape, logits.dtype)
    assert torch.equal(gate.bfloat16().float(), gate)
    assert torch.equal(logits.bfloat16().float(), logits)
