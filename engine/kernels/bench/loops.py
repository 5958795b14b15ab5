"""Whole loops of random weights through the kernels, as the kernel benchmark times them.

Owns the order of launches of one loop of either model's core, for pure decode and for one packed prompt. Buffers are
made once; every call launches on the current stream, so that a graph can hold a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.kernels.bench.rows import PAGE_TOKENS, DecodeBatch, Pool
from epicycle.engine.kernels.bench.shapes import Shape
from epicycle.engine.kernels.bench.timing import random_weights
from epicycle.engine.kernels.decode_attention_triton import DecodeConfig, decode_attention
from epicycle.engine.kernels.gemm_triton import run_product, stored_as
from epicycle.engine.kernels.hopper_prompt_triton import hopper_prompt_attention
from epicycle.engine.kernels.norm_triton import gate_logit, norm, norm_after
from epicycle.engine.kernels.products import GemmConfig, Product
from epicycle.engine.kernels.prompt_attention_triton import PromptChunks, prompt_attention
from epicycle.engine.kernels.rope_kv_triton import RowAddresses, Turning, rope_kv
from epicycle.engine.kernels.triton_common import starts_early
from epicycle.engine.kernels.turned_triton import TurnedRows, find_places
from epicycle.engine.kernels.wide_triton import turn_product

EPS = 1e-6
Pick = Callable[[Product, int], GemmConfig]
Attend = Callable[[Tensor, int], Tensor]  # the QKV product and the layer
Turn = Callable[[Tensor, Tensor, int], Tensor]  # x, a QKV weight and the layer, to q for `attend`


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: list[Tensor]


class Core:
    """Random weights of one loop."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = [self._layer() for _ in range(shape.layers)]
        self.final_norm = self._norm()
        self.gate = random_weights(1, shape.hidden, 1)[0]
        self.gate_bias = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
        adapter = shape.adapter
        self.adapter = random_weights(adapter.outputs, adapter.inputs, 1)[0] if shape.pairs else None

    def _norm(self) -> Tensor:
        return 1 + 0.1 * torch.randn(self.shape.hidden, dtype=torch.bfloat16, device="cuda")

    def _layer(self) -> LayerWeights:
        made = [random_weights(kind.weight_rows, kind.inputs, 1)[0] for kind in self.shape.core_products()]
        return LayerWeights(made[0], made[1], made[2], made[3], [self._norm() for _ in range(4)])


class Loop:
    """One loop over `rows` rows; `pick` says how each product runs, but for QKV with `turn`."""

    def __init__(self, core: Core, rows: int, pick: Pick, attend: Attend, turn: Turn | None = None) -> None:
        self.core, self.shape, self.rows, self.attend, self.turn = core, core.shape, rows, attend, turn
        self.pick = pick
        width = self.shape.hidden * (2 if self.shape.pairs else 1)
        self.state = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
        self.h = torch.empty(rows, self.shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.x = torch.empty_like(self.h)
        self._outs = {kind.name: self._out(kind) for kind in self.shape.core_products()}

    def _out(self, kind: Product) -> Tensor | None:
        config = self.pick(kind, self.rows)
        if config.kernel == "library":
            return None
        is_parts = stored_as(kind, config) == "parts"
        size = (kind.chunks, self.rows, kind.outputs) if is_parts else (self.rows, kind.outputs)
        dtype = torch.float32 if is_parts else torch.bfloat16
        return torch.empty(size, dtype=dtype, device="cuda")

    def _run(self, kind: Product, x: Tensor, weight: Tensor) -> Tensor:
        return run_product(kind, x, weight, self.pick(kind, self.rows), self._outs[kind.name])

    def __call__(self) -> Tensor:
        core, shape = self.core, self.shape
        first = core.layers[0].norms[0]
        if core.adapter is not None:
            self.h = run_product(shape.adapter, self.state, core.adapter, self.pick(shape.adapter, self.rows))
            norm(self.h, first, EPS, out=self.x)
        else:
            self.h.copy_(self.state)
            norm(self.h, first, EPS, out=self.x)
        for index, layer in enumerate(core.layers):
            is_last = index + 1 == shape.layers
            self._layer(index, layer, None if is_last else core.layers[index + 1])
        if core.adapter is not None:
            return self.h
        self.state.copy_(self.x)
        return gate_logit(self.x, core.gate, core.gate_bias)

    def _layer(self, index: int, layer: LayerWeights, following: LayerWeights | None) -> None:
        shape, h, x, norms = self.shape, self.h, self.x, layer.norms
        before: Tensor | None = None if shape.pairs else self.core.final_norm
        if following is not None:
            before = following.norms[0]
        qkv = self._run(shape.qkv, x, layer.qkv) if self.turn is None else self.turn(x, layer.qkv, index)
        mixed = self.attend(qkv, index)
        a = self._run(shape.out, mixed, layer.out)
        norm_after(shape.norm_stage, a, h, norms[1], norms[2], EPS, h_out=h, x_out=x)
        active = self._run(shape.gate_up, x, layer.gate_up)
        last = self._run(shape.down, active, layer.down)
        norm_after(shape.norm_stage, last, h, norms[3], before, EPS, h_out=h, x_out=x)


def no_attention(shape: Shape, rows: int) -> Attend:
    """Everything but attention: takes the first third of the product as it is."""
    width = shape.heads * shape.head_dim
    return lambda qkv, layer: qkv[:, :width]


def fused_decode(shape: Shape, pool: Pool, batch: DecodeBatch, turning: Turning, config: DecodeConfig) -> Attend:
    """Rotation, KV write and attention in one kernel."""
    rows = batch.rows.slots.shape[0]
    out = torch.empty(rows, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    early = starts_early(out.device, rows)

    def attend(qkv: Tensor, layer: int) -> Tensor:
        at = layer % pool.slots_per_page
        return decode_attention(
            qkv, shape.heads, batch.rows, batch.work, batch.scratch, pool.k, pool.v, at,
            turning=turning, out=out, config=config, early=early, ahead=early and rows == 1,
        )  # fmt: skip

    return attend


def separate_decode(shape: Shape, pool: Pool, batch: DecodeBatch, turning: Turning, config: DecodeConfig) -> Attend:
    """Rotation and KV write in a kernel of their own, then attention."""
    rows = batch.rows.slots.shape[0]
    q, out = (torch.empty(rows, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    early = starts_early(out.device, rows)

    def attend(qkv: Tensor, layer: int) -> Tensor:
        at = layer % pool.slots_per_page
        rope_kv(qkv, shape.heads, turning, batch.rows, pool.k, pool.v, at, out=q, early=early)
        return decode_attention(
            q, shape.heads, batch.rows, batch.work, batch.scratch, pool.k, pool.v, at,
            out=out, config=config, early=early,
        )  # fmt: skip

    return attend


def prompt(
    shape: Shape, pool: Pool, rows: RowAddresses, chunks: PromptChunks, turning: Turning | None, *, is_hopper: bool
) -> Attend:
    """Packed prompt chunks; of q that has turned, without `turning`."""
    kernel = hopper_prompt_attention if is_hopper else prompt_attention
    count = rows.slots.shape[0]
    q, out = (torch.empty(count, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def attend(qkv: Tensor, layer: int) -> Tensor:
        at = layer % pool.slots_per_page
        turned = qkv if turning is None else rope_kv(qkv, shape.heads, turning, rows, pool.k, pool.v, at, out=q)
        return kernel(turned, shape.heads, rows, chunks, pool.k, pool.v, at, out=out)

    return attend


def turn_inside(shape: Shape, pool: Pool, rows: RowAddresses, turning: Turning, config: GemmConfig) -> Turn:
    """QKV products that turn their rows themselves; what a loop's layers share is made by its first."""
    q = torch.empty(len(rows.slots), shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    places = find_places(rows, turning, PAGE_TOKENS)

    def turn(x: Tensor, weight: Tensor, layer: int) -> Tensor:
        nonlocal places
        if layer == 0:
            places = find_places(rows, turning, PAGE_TOKENS)
        at = layer % pool.slots_per_page
        return turn_product(x, weight, config, TurnedRows(q, pool.k, pool.v, places, at))

    return turn
