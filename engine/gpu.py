"""How an engine computes on a GPU: checked products, the tick's kernels, graphs.

Owns the list of products a model multiplies by, their compilation side by side at start, and the putting together of a
device tick. It is imported only where there is a GPU, since it needs Triton. It must not know pools' sizes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from epicycle.engine.device_tick import DeviceTick
from epicycle.engine.exits.base import ExitRule
from epicycle.engine.exits.registry import RULES
from epicycle.engine.flash_attention import FlashParts
from epicycle.engine.graph_runner import Part, PlainRunner
from epicycle.engine.graphs import GRAPH_BYTES, MOST_GRAPHS, CaptureReport, GraphRunner, parts_of
from epicycle.engine.kernels.candidates import candidates, sure
from epicycle.engine.kernels.gemm_triton import run_product
from epicycle.engine.kernels.ladder import STEPS, Choices, step_for
from epicycle.engine.kernels.product_probe import check_products, rows_that_agree
from epicycle.engine.kernels.products import LIBRARY, GemmConfig, Product
from epicycle.engine.kernels.triton_ops import TritonOps, product_of
from epicycle.engine.kernels.turned_check import Heads, turned_config
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.settle import TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import Ladder, TickShape
from epicycle.engine.tick_kernels import kernel_backend

SPARE_SHARE = 0.02  # of the card, for what nobody measures
_WARM_OUTPUTS = 512  # rows of the weight that a configuration is compiled with
_WARM_ROWS = 8

Progress = Callable[[str], None]
_AGREES: dict[tuple[Product, int, torch.dtype, torch.device], bool] = {}
_CHOSEN: dict[tuple[Product, int, torch.dtype, torch.device, bool], tuple[GemmConfig, GemmConfig]] = {}


def products_of(spec: ModelSpec) -> list[Product]:
    """Every product that fused layers, the head and Nanbeige's loop multiply by."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    shapes = [(qkv, hidden, "plain"), (hidden, heads, "plain"), (2 * inner, hidden, "pair"), (hidden, inner, "plain")]
    if spec.state_width != hidden:
        shapes.append((hidden, spec.state_width, "plain"))
    if spec.model_type == "nanbeige":
        shapes.append((2 * inner, hidden, "plain"))
    shapes.append((spec.vocab_size, hidden, "float"))
    return list(dict.fromkeys(product_of(*shape) for shape in shapes))


def make_ops(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    row_counts: list[int],
    on_progress: Progress,
    *,
    keeps_bits: bool = True,
) -> TritonOps:
    """Operations whose products run, at every number of rows, the fastest way that keeps a row's bits; without
    `keeps_bits` the fastest way. `row_counts` are those of ticks."""
    products = products_of(spec)
    steps = [step for step in STEPS if step <= step_for(max(row_counts))]
    on_progress("compiling kernels")
    tried = [
        (product, config)
        for product in products
        for step in steps
        for config in (*candidates(product, step), sure(product))
        if config != LIBRARY
    ]
    _compile_side_by_side(tried, dtype, device, is_counted=False)
    on_progress("checking and timing products")
    choices = _choices(products, steps, dtype, device, keeps_bits=keeps_bits)
    for product in products:
        between = [rows for rows in row_counts if rows not in STEPS and choices.find(product, rows) == LIBRARY]
        agree = _rows_that_agree(product, between, dtype, device) if keeps_bits else frozenset(between)
        choices.exact[product.name] = agree
    if spec.model_type == "ouro":  # of fused loops the one that turns by halves and has no biases
        choices.turned = _turned(spec, choices, steps, dtype, device)
    if spec.has_costly_boundary:
        counted = [(product, choices.find_counted(product, step)) for product in products for step in steps]
        found = [(product, config) for product, config in counted if config is not None]
        _compile_side_by_side(found, dtype, device, is_counted=True)
    return TritonOps(choices)


def _turned(
    spec: ModelSpec, choices: Choices, steps: list[int], dtype: torch.dtype, device: torch.device
) -> dict[tuple[str, int], GemmConfig]:
    """Of QKV products by name and step, where they are faster with rotation and KV write than apart."""
    heads = Heads(spec.heads, spec.kv_heads, spec.head_dim)
    qkv = product_of((heads.heads + 2 * heads.kv_heads) * heads.width, spec.hidden_size)
    tried = {step: turned_config(qkv, choices.get(qkv, step), heads, step, dtype, device) for step in steps}
    return {(qkv.name, step): config for step, config in tried.items() if config is not None}


def _rows_that_agree(product: Product, rows: list[int], dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    new = [count for count in rows if (product, count, dtype, device) not in _AGREES]
    if new:
        agree = rows_that_agree(product, new, dtype, device)
        _AGREES.update({(product, count, dtype, device): count in agree for count in new})
    return frozenset(count for count in rows if _AGREES[product, count, dtype, device])


def _choices(
    products: list[Product], steps: list[int], dtype: torch.dtype, device: torch.device, *, keeps_bits: bool
) -> Choices:
    """Every product is checked and timed once a process: engines that follow one another get the same choices."""
    for product in products:
        new_steps = [step for step in steps if (product, step, dtype, device, keeps_bits) not in _CHOSEN]
        if new_steps:
            found = check_products([product], new_steps, dtype, device, keeps_bits=keeps_bits)
            for step in new_steps:
                counted = found.find_counted(product, step) or sure(product)
                _CHOSEN[product, step, dtype, device, keeps_bits] = found.get(product, step), counted
    choices = Choices()
    for product in products:
        for step in steps:
            picked, counted = _CHOSEN[product, step, dtype, device, keeps_bits]
            choices.picked[product.name, step], choices.counted[product.name, step] = picked, counted
    return choices


def _compile_side_by_side(
    units: list[tuple[Product, GemmConfig]], dtype: torch.dtype, device: torch.device, *, is_counted: bool
) -> None:
    """Launch every unit once from as many threads as there are cores, since each takes about a second."""
    wanted: dict[tuple[str, str, int, int], tuple[Product, GemmConfig]] = {}
    for product, config in units:
        wanted.setdefault((config.key, product.epilogue, product.chunks, product.inputs), (product, config))
    count = torch.ones(1, dtype=torch.int32, device=device) if is_counted else None

    def launch(unit: tuple[Product, GemmConfig]) -> None:
        product, config = unit
        small = Product(product.name, _WARM_OUTPUTS, product.inputs, product.epilogue, product.chunks)
        x = torch.zeros(_WARM_ROWS, product.inputs, dtype=dtype, device=device)
        try:
            run_product(small, x, x.new_zeros(small.weight_rows, product.inputs), config, count=count)
        except Exception:  # this card or this Triton refuses it: the check finds the same and leaves it out
            return

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        list(threads.map(launch, wanted.values()))
    torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU has for the KV pool once the rest has its share; all bytes."""

    free: int
    work: int  # of ticks, launched step by step
    graphs: int
    buffers: int  # of the tick, beside slots
    spare: int

    @property
    def bytes(self) -> int:
        return max(0, self.free - self.work - self.graphs - self.buffers - self.spare)

    def line(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name) / 2**20:,.0f} MiB" for name in ("free", "work", "graphs", "buffers", "spare")
        )
        return f"room for KV {self.bytes / 2**30:.2f} GiB: {parts}"


def measure_room(
    make_slots: Callable[[], SlotTable],
    make: Callable[[SlotTable], tuple[DeviceTick, TickTensors]],
    spec: ModelSpec,
    device: torch.device,
    *,
    has_graphs: bool,
) -> Room:
    """Run the largest parts of a tick that `make` puts on a scratch pool, so that every kernel is loaded, and see what
    they need; then let go of it all and see what is free. Slots are the pool plan's to count."""
    slots = make_slots()
    before = torch.cuda.memory_allocated(device)
    tick, tensors = make(slots)
    buffers = torch.cuda.memory_allocated(device) - before
    ladder = tensors.inputs.ladder
    whole, most = TickShape(ladder.decode[-1], 0), TickShape(ladder.beside[-1], ladder.prompt[-1])
    parts = [Part("loop", most, flag=True), Part("sampled", most, flag=True), Part("token", whole)]
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for part in parts:
        tick.rehearse(part)
    torch.cuda.synchronize(device)
    work = torch.cuda.max_memory_allocated(device) - held
    graphs = work + min(MOST_GRAPHS, len(_parts(ladder, spec))) * GRAPH_BYTES if has_graphs else 0
    del tick, tensors, slots
    _let_go()
    free, total = torch.cuda.mem_get_info(device)
    return Room(free, work, graphs, buffers, int(total * SPARE_SHARE))


def _let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _parts(ladder: Ladder, spec: ModelSpec) -> list[Part]:
    return parts_of(ladder, has_prelude_layers=spec.first_recurrent > 0, has_coda_layers=spec.coda_layers > 0)


def make_tick(
    model: LoopedModel,
    ops: TritonOps,
    pool: KvPool,
    tensors: TickTensors,
    rule: ExitRule,
    rule_name: str,
    *,
    has_graphs: bool,
    on_progress: Progress,
    flash: FlashParts,
) -> tuple[DeviceTick, CaptureReport | None]:
    """A tick that never waits for the device, captured where `has_graphs`. `ops` are the model's."""
    backend = kernel_backend(model, ops, pool, tensors, rule, rule_name, RULES[rule_name], flash, on_progress)
    if not has_graphs:
        return DeviceTick(model, tensors, backend, PlainRunner()), None
    runner = GraphRunner(pool.device)
    tick = DeviceTick(model, tensors, backend, runner)
    report = runner.capture(_parts(tensors.inputs.ladder, model.spec), tick.rehearse, on_progress)
    on_progress(report.line())
    return tick, report
