"""The layers of a model in fewer launches: products with what follows them, norms with what stands before and after.

Owns the order of launches for the models that have such kernels, with the operations, the roundings and so the bits of
the models' own `prelude`, `loop` and `coda`, which stay the plain twins. Rotation and the KV write belong to the rows,
which know where they go. Prelude and coda may run for the first rows only, whose number the device knows.
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
    """What fused layers ask of their rows."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def noise_seeds(self) -> Tensor: ...

    def project(
        self,
        layer: int,
        x: Tensor,
        weight: Tensor,
        turning: Turning,
        ops: TritonOps,
        count: Tensor | None = None,
        *,
        is_once: bool = False,
    ) -> tuple[Tensor, Turning | None]:
        """The QKV product of x by `weight` and the turning that is left to do, both for `attend_product`. Rows from
        `count` [1] int32 on are wanted by nobody."""
        ...

    def attend_product(self, layer: int, qkv: Tensor, turning: Turning | None, *, is_once: bool = False) -> Tensor:
        """Rotate, write k and v, attend: QKV product [N, (heads + 2 kv_heads) d] -> [N, heads * d]. Without `turning`
        comes q that has turned, with k and v written. `is_once` in layers outside the loop."""
        ...


class FusedLoop(Protocol):
    def __call__(
        self, state: Tensor, rows: ProductRows, *, wants_gate: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...


class FusedEnd(Protocol):
    def __call__(self, x: Tensor, rows: ProductRows, count: Tensor | None = None) -> Tensor:
        """`LoopedModel.prelude` or `coda` of x; rows from `count` [1] int32 on are wanted by nobody."""
        ...


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
    is_once: bool = False

    def run(
        self, state: Tensor, rows: ProductRows, last_norm: Tensor | None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(h, norm of h by `last_norm`, or h again without one) after all layers of `state` [N, H]."""
        ops, eps = self.ops, self.eps
        h, x = state, norm(state, self.layers[0].norms[0], eps)
        for place, layer in enumerate(self.layers):
            follows = place + 1 < len(self.layers)
            before = self.layers[place + 1].norms[0] if follows else last_norm
            number, is_once = layer.number, self.is_once
            qkv, turning = rows.project(number, x, layer.qkv, layer.turning, ops, count, is_once=is_once)
            mixed = rows.attend_product(number, qkv, turning, is_once=is_once)
            out = ops.product(mixed, layer.out, count=count)
            h, x = norm_after(self.stage, out, h, layer.norms[1], layer.norms[2], eps)
            down = ops.product(ops.product(x, layer.gate_up, "pair", count), layer.down, count=count)
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
        layers = _huginn_layers(model, spec.first_recurrent, spec.recurrent_layers)
        self._stack = _Stack(ops, layers, "sum", spec.norm_eps)
        self._model = model
        self._ops = ops

    def __call__(self, state: Tensor, rows: ProductRows, *, wants_gate: bool = True) -> tuple[Tensor, Tensor | None]:
        latent = self._ops.linear(state, self._model.adapter)
        latent, _ = self._stack.run(latent, rows, None)
        return torch.cat((latent, state[:, self._model.spec.hidden_size :]), dim=1), None


class FusedHuginnPrelude:
    """Meets `FusedEnd`."""

    def __init__(self, model: HuginnModel, ops: TritonOps) -> None:
        layers = _huginn_layers(model, 0, model.spec.first_recurrent)
        self._stack = _Stack(ops, layers, "sum", model.spec.norm_eps, is_once=True)
        self._model = model

    def __call__(self, x: Tensor, rows: ProductRows, count: Tensor | None = None) -> Tensor:
        injection, _ = self._stack.run(self._model.embed(x), rows, None, count)
        return self._model.with_start(injection, rows.noise_seeds, rows.positions)


class FusedHuginnCoda:
    """Meets `FusedEnd`."""

    def __init__(self, model: HuginnModel, ops: TritonOps) -> None:
        spec = model.spec
        layers = _huginn_layers(model, spec.first_recurrent + spec.recurrent_layers, spec.coda_layers)
        self._stack = _Stack(ops, layers, "sum", spec.norm_eps, is_once=True)
        self._model = model

    def __call__(self, x: Tensor, rows: ProductRows, count: Tensor | None = None) -> Tensor:
        spec, last_norm = self._model.spec, self._model.norm
        latent = norm(x[:, : spec.hidden_size], last_norm, spec.norm_eps)
        return self._stack.run(latent, rows, last_norm, count)[1]


def _huginn_layers(model: HuginnModel, first: int, count: int) -> list[_Layer]:
    layers = []
    for number in range(first, first + count):
        block = model.blocks[number]
        turning = Turning(model.cos, model.sin, True, block.qk_bias)
        layers.append(_Layer(number, block.qkv, block.out, block.gate_up, block.down, block.norms, turning))
    return layers


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


def fuse_ends(model: LoopedModel, ops: TritonOps) -> tuple[FusedEnd, FusedEnd] | None:
    """The fused prelude and coda of `model`, None where its own are all there is."""
    if isinstance(model, HuginnModel) and model.spec.first_recurrent and model.spec.coda_layers:
        return FusedHuginnPrelude(model, ops), FusedHuginnCoda(model, ops)
    return None
