"""How an engine computes on a GPU: checked products, the tick's kernels, graphs.

Owns the list of products a model multiplies by, their compilation side by side at start, and the putting together of a
device tick. It is imported only where there is a GPU, since it needs Triton. It must not know pools' sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from epicycle.engine.device_tick import DeviceTick
from epicycle.engine.exits.base import ExitRule
from epicycle.engine.exits.registry import RULES
from epicycle.engine.graph_runner import PlainRunner
from epicycle.engine.graphs import CaptureReport, GraphRunner, parts_of
from epicycle.engine.kernels.gemm_triton import run_product
from epicycle.engine.kernels.ladder import LIBRARY, STEPS, GemmConfig, Product, candidates, step_for, sure
from epicycle.engine.kernels.product_probe import check_products
from epicycle.engine.kernels.triton_ops import TritonOps, product_of
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.settle import TickTensors
from epicycle.engine.tick_kernels import kernel_backend

_WARM_OUTPUTS = 512  # rows of the weight that a configuration is compiled with
_WARM_ROWS = 8

Progress = Callable[[str], None]


def products_of(spec: ModelSpec) -> list[Product]:
    """Every product that the fused loop, the head and, where they hold layers, prelude and coda multiply by."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    shapes = [(qkv, hidden, "plain"), (hidden, heads, "plain"), (2 * inner, hidden, "pair"), (hidden, inner, "plain")]
    if spec.state_width != hidden:
        shapes.append((hidden, spec.state_width, "plain"))
    if spec.model_type == "nanbeige" or spec.has_costly_boundary:
        shapes.append((2 * inner, hidden, "plain"))
    shapes.append((spec.vocab_size, hidden, "float"))
    return list(dict.fromkeys(product_of(*shape) for shape in shapes))


def make_ops(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, most_rows: int, on_progress: Progress
) -> TritonOps:
    """Operations whose products run, at every number of rows, the fastest way that keeps a row's bits."""
    products = products_of(spec)
    steps = [step for step in STEPS if step <= step_for(most_rows)]
    on_progress("compiling kernels")
    _compile_side_by_side(products, steps, dtype, device)
    on_progress("checking and timing products")
    return TritonOps(check_products(products, steps, dtype, device))


def _compile_side_by_side(products: list[Product], steps: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Launch every configuration once from as many threads as there are cores, since each takes about a second."""
    wanted: dict[tuple[str, str, int, int], tuple[Product, GemmConfig]] = {}
    for product in products:
        for step in steps:
            for config in (*candidates(product, step), sure(product)):
                if config != LIBRARY:
                    wanted.setdefault((config.key, product.epilogue, product.chunks, product.inputs), (product, config))

    def launch(unit: tuple[Product, GemmConfig]) -> None:
        product, config = unit
        small = Product(product.name, _WARM_OUTPUTS, product.inputs, product.epilogue, product.chunks)
        x = torch.zeros(_WARM_ROWS, product.inputs, dtype=dtype, device=device)
        try:
            run_product(small, x, x.new_zeros(small.weight_rows, product.inputs), config)
        except Exception:  # this card or this Triton refuses it: the check finds the same and leaves it out
            return

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        list(threads.map(launch, wanted.values()))
    torch.cuda.synchronize(device)


def make_tick(
    model: LoopedModel,
    ops: TritonOps | None,
    pool: KvPool,
    tensors: TickTensors,
    rule: ExitRule,
    rule_name: str,
    *,
    has_graphs: bool,
    on_progress: Progress,
) -> tuple[DeviceTick, CaptureReport | None]:
    """A tick that never waits for the device, captured where `has_graphs`. `ops` are the model's, if kernels are."""
    backend = kernel_backend(model, ops, pool, tensors, rule, rule_name, RULES[rule_name])
    if not has_graphs:
        return DeviceTick(model, tensors, backend, PlainRunner()), None
    runner = GraphRunner(pool.device)
    tick = DeviceTick(model, tensors, backend, runner)
    spec = model.spec
    parts = parts_of(
        tensors.inputs.ladder,
        has_prelude_layers=spec.first_recurrent > 0,
        has_coda_layers=spec.coda_layers > 0,
    )
    return tick, runner.capture(parts, tick.rehearse, on_progress)
