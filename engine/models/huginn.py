"""Huginn: prelude blocks, a core that mixes a noisy state with the injected prelude output, coda blocks; no gate.

Owns the order of Huginn's operations. A row's state is (latent state, injection), side by side, which is also the
adapter's input as it stands. Norms two and four are applied to the SUM of sublayer output and residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.noise import quantile_table
from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models.base import Rows
from epicycle.engine.models.config_huginn import block_names
from epicycle.engine.models.rope import pair_tables
from epicycle.engine.models.spec import ModelSpec

_Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    qkv: Tensor
    qk_bias: Tensor  # [2 H]: added to the first two thirds of qkv
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class _Turn:
    """cos and sin of this call's rows: [N, d / 2] float32 (adjacent pairs)."""

    cos: Tensor
    sin: Tensor


class HuginnModel:
    """See `base.LoopedModel`. The constructor consumes `weights` (public names, one device, one dtype).

    `start_state` "noise" draws each row's first latent state from its (noise seed, position); "zero" is for
    comparison with references that start from zero. A stored `freqs_cis` [1, context, 1, d / 2, 2] float32 in
    `weights` is used as the rotation table, since the published model rotates by it; without one it is recomputed.
    Weights of the loop can be read by whoever computes the same loop another way.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], ops: Ops, start_state: str = "noise") -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = weights.pop("transformer.wte.weight")
        self.adapter = weights.pop("transformer.adapter.weight")
        self.norm = weights.pop("transformer.ln_f.weight")
        self.blocks = [_take_block(weights, prefix) for prefix in block_names(spec)]
        self.cos, self.sin = self._rotation_tables(weights.pop("freqs_cis", None))
        self._noise = (
            quantile_table(spec.init_std, spec.embed_scale, self._embedding.device) if start_state == "noise" else None
        )

    def prelude(self, tokens: Tensor, rows: Rows) -> Tensor:
        injection = self._run(0, self.spec.first_recurrent, self.embed(tokens), rows.attend_once, self._turn(rows))
        return self.with_start(injection, rows.noise_seeds, rows.positions)

    def loop(self, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        first, count = self.spec.first_recurrent, self.spec.recurrent_layers
        latent = self._ops.linear(state, self.adapter)
        latent = self._run(first, count, latent, rows.attend, self._turn(rows))
        return torch.cat((latent, state[:, self.spec.hidden_size :]), dim=1), None

    def coda(self, state: Tensor, rows: Rows) -> Tensor:
        spec, ops = self.spec, self._ops
        x = ops.rms_norm(state[:, : spec.hidden_size], self.norm, spec.norm_eps)
        first = spec.first_recurrent + spec.recurrent_layers
        x = self._run(first, spec.coda_layers, x, rows.attend_once, self._turn(rows))
        return ops.rms_norm(x, self.norm, spec.norm_eps)

    def head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        return self._ops.logits(x, self._embedding, count)

    def embed(self, tokens: Tensor) -> Tensor:
        """[N, H] what prelude blocks begin with."""
        return self._ops.embed(self._embedding, tokens, self.spec.embed_scale)

    def with_start(self, injection: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """[N, 2 H] states before the first loop: latent start states, then what prelude blocks end with."""
        if self._noise is None:
            return torch.cat((torch.zeros_like(injection), injection), dim=1)
        width, dtype = self.spec.hidden_size, injection.dtype
        start = self._ops.start_noise(self._noise, seeds, positions, width, dtype)
        return torch.cat((start, injection), dim=1)

    def _turn(self, rows: Rows) -> _Turn:
        return _Turn(self.cos[rows.positions], self.sin[rows.positions])

    def _run(self, first: int, count: int, x: Tensor, attend: _Attend, turn: _Turn) -> Tensor:
        for layer in range(first, first + count):
            x = self._block(layer, x, attend, turn)
        return x

    def _block(self, layer: int, x: Tensor, attend: _Attend, turn: _Turn) -> Tensor:
        ops, block, eps = self._ops, self.blocks[layer], self.spec.norm_eps
        mixed = self._attention(layer, ops.rms_norm(x, block.norms[0], eps), attend, turn)
        x = ops.rms_norm(ops.add(mixed, x), block.norms[1], eps)
        gate, up = ops.linear(ops.rms_norm(x, block.norms[2], eps), block.gate_up).chunk(2, dim=-1)
        out = ops.linear(ops.silu_mul(gate, up), block.down)
        return ops.rms_norm(ops.add(out, x), block.norms[3], eps)

    def _attention(self, layer: int, x: Tensor, attend: _Attend, turn: _Turn) -> Tensor:
        ops, block, spec = self._ops, self.blocks[layer], self.spec
        qkv = ops.linear(x, block.qkv)
        width = 2 * spec.hidden_size
        qk = ops.add(qkv[:, :width], block.qk_bias).view(-1, 2 * spec.heads, spec.head_dim)
        qk = ops.rope_pairs(qk, turn.cos, turn.sin)
        v = qkv[:, width:].view(-1, spec.heads, spec.head_dim)
        mixed = attend(layer, qk[:, : spec.heads], qk[:, spec.heads :], v)
        return ops.linear(mixed.flatten(1), block.out)

    def _rotation_tables(self, stored: Tensor | None) -> tuple[Tensor, Tensor]:
        device = self._embedding.device
        if stored is not None:
            cos, sin = stored[0, :, 0].unbind(-1)
            return cos.contiguous().to(device), sin.contiguous().to(device)
        cos, sin = pair_tables(self.spec.head_dim, self.spec.rope_theta, self.spec.context_tokens)
        return cos.to(device), sin.to(device)


def _take_block(weights: dict[str, Tensor], prefix: str) -> Block:
    first, second, third, fourth = (weights.pop(f"{prefix}.norm_{index}.weight") for index in (1, 2, 3, 4))
    return Block(
        (first, second, third, fourth),
        qkv=weights.pop(f"{prefix}.attn.Wqkv.weight"),
        qk_bias=weights.pop(f"{prefix}.attn.qk_bias").reshape(-1),
        out=weights.pop(f"{prefix}.attn.proj.weight"),
        gate_up=weights.pop(f"{prefix}.mlp.fc.weight"),
        down=weights.pop(f"{prefix}.mlp.proj.weight"),
    )
