"""One loop of a model in fewer launches: products with what follows them, norms with what stands before and after.

Owns the order of launches for the models that have such kernels, with the operations, the roundings and so the bits of
the models' own `loop`, which stays the plain twin. Rotation and the KV write belong to the attention launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.kernels.norm_triton import gate_logit, norm, norm_after
from epicycle.engine.kernels.rope_kv_triton import Turning
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.huginn import HuginnModel
from epicycle.engine.models.ouro import OuroModel


class ProductRows(Protocol):
    """What a fused loop asks of its rows."""

    def attend_product(self, layer: int, qkv: Tensor, turning: Turning) -> Tensor:
        """Rotate, write k and v, attend: QKV product [N, (heads + 2 kv_heads) d] -> [N, heads * d]."""
        ...


class FusedLoop(Protocol):
    def __call__(
        self, state: Tensor, rows: ProductRows, *, wants_gate: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Norms before and after attention, before and after the MLP."""

    number: int
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    turning: Turning


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers whose norms are "sandwich" or "sum" stages of `norm_triton`."""

    ops: TritonOps
    layers: list[_Layer]
    stage: str
    eps: float

    def run(self, state: Tensor, rows: ProductRows, last_norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """(h, norm of h by `last_norm`, or h again without one) after all layers of `state` [N, H]."""
        ops, eps = self.ops, self.eps
        h, x = state, norm(state, self.layers[0].norms[0], eps)
        for place, layer in enumerate(self.layers):
            follows = place + 1 < len(self.layers)
            before = self.layers[place + 1].norms[0] if follows else last_norm
            mixed = rows.attend_product(layer.number, ops.product(x, layer.qkv), layer.turning)
            h, x = norm_after(self.stage, ops.product(mixed, layer.out), h, layer.norms[1], layer.norms[2], eps)
            down = ops.product(ops.product(x, layer.gate_up, "pair"), layer.down)
            h, x = norm_after(self.stage, down, h, layer.norms[3], before, eps, h_out=h)
        return h, x


class FusedOuro:
    """Meets `FusedLoop`."""

    def __init__(self, model: OuroModel, ops: TritonOps) -> None:
        turning = Turning(model.cos, model.sin, False)
        layers = []
        for number, layer in enumerate(model.layers):
            w = layer.projections
            norms = layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp
            layers.append(_Layer(number, w.qkv, w.out, w.gate_up, w.down, norms, turning))
        self._stack = _Stack(ops, layers, "sandwich", model.spec.norm_eps)
        self._model = model

    def __call__(self, state: Tensor, rows: ProductRows, *, wants_gate: bool = True) -> tuple[Tensor, Tensor | None]:
        model = self._model
        _, state = self._stack.run(state, rows, model.norm)
        return state, gate_logit(state, model.gate, model.gate_bias) if wants_gate else None


class FusedHuginn:
    """Meets `FusedLoop`."""

    def __init__(self, model: HuginnModel, ops: TritonOps) -> None:
        spec = model.spec
        layers = []
        for number in range(spec.first_recurrent, spec.first_recurrent + spec.recurrent_layers):
            block = model.blocks[number]
            turning = Turning(model.cos, model.sin, True, block.qk_bias)
            layers.append(_Layer(number, block.qkv, block.out, block.gate_up, block.down, block.norms, turning))
        self._stack = _Stack(ops, layers, "sum", spec.norm_eps)
        self._model = model
        self._ops = ops

    def __call__(self, state: Tensor, rows: ProductRows, *, wants_gate: bool = True) -> tuple[Tensor, Tensor | None]:
        latent = self._ops.linear(state, self._model.adapter)
        latent, _ = self._stack.run(latent, rows, None)
        return torch.cat((latent, state[:, self._model.spec.hidden_size :]), dim=1), None


def turns_pairs(model: LoopedModel) -> bool | None:
    """The convention by which a fused loop of `model` rotates; None without one."""
    return isinstance(model, HuginnModel) if isinstance(model, OuroModel | HuginnModel) else None


def fuse(model: LoopedModel, ops: TritonOps) -> FusedLoop | None:
    """The fused loop of `model`, None where its own is all there is."""
    if isinstance(model, OuroModel):
        return FusedOuro(model, ops)
    if isinstance(model, HuginnModel):
        return FusedHuginn(model, ops)
    return None
