"""From options to what an engine is made of: device, dtype, depth, layout, operations, exit rule, slots and pool plan.

Owns the resolution of options against the model and the machine, and the order in which a GPU's memory is measured. It
must not know how ticks are run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from epicycle.engine.attention_choice import AttentionChoice, AttentionFacts, choose_attention, installed_libraries
from epicycle.engine.device_tick import DeviceTick, make_tensors
from epicycle.engine.early_start import late_reason
from epicycle.engine.errors import EngineError, OptionError
from epicycle.engine.exits import registry as exits
from epicycle.engine.flash_attention import FlashParts
from epicycle.engine.heads import HeadRows
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.tiled import TiledOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.locate import ModelFiles
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.selfcheck import ATTENTION_TOKENS, check_attention, choose_ops
from epicycle.engine.settle import TickTensors
from epicycle.engine.slots import SlotTable, slot_bytes
from epicycle.engine.tick_inputs import Ladder
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import KvLayout, build_layout
from epicycle.kvstore.plan import PoolPlan, PoolRequest, plan_pool
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.config import EngineConfig

if TYPE_CHECKING:
    from epicycle.engine.kernels.triton_ops import TritonOps

CPU_KV_BYTES = 512 << 20
MOST_HOST_KV_BYTES = 4 << 30  # where it isn't configured: pinned at start on a GPU
PROMPT_CHUNK_TOKENS = {"cpu": 64, "cuda": 256}
IDLE_CHUNK_TOKENS = {"cpu": 64, "cuda": 2048}  # where few rows decode, or many tokens wait
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Where `what` doesn't fit the device's memory: an EngineError that names it, what was left, and the knobs."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        knobs = "lower kv_memory_bytes, slots, context_tokens or prompt_chunk_tokens"
        raise EngineError("out_of_memory", f"no memory on the GPU for {what}: {error}; {knobs}") from error


def resolve_device(name: str) -> torch.device:
    """The torch device of a name; "auto" is the first GPU where there is one."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError("bad_option", f"device is {name!r}; use auto, cpu or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("bad_option", f"device is {name!r} and torch sees no GPU; use auto or cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    return _DTYPES[("float32" if device.type == "cpu" else "bfloat16") if name == "auto" else name]


def serve_loops(spec: ModelSpec, loops: int) -> ModelSpec:
    """The spec with `loops` as its full depth; 0 keeps the model's."""
    if loops > spec.loops:
        raise OptionError("bad_option", f"loops is {loops}; {spec.model_type} was made for at most {spec.loops}")
    if not loops:
        return spec
    return dataclasses.replace(spec, loops=loops, min_loops=min(spec.min_loops, loops))


def make_layout(options: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> KvLayout:
    """The KV layout of a model under these options. Raises KvError."""
    geometry = KvGeometry(
        layers=spec.layers,
        first_recurrent=spec.first_recurrent,
        recurrent_layers=spec.recurrent_layers,
        loops=spec.loops,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=dtype.itemsize,
        page_tokens=options.page_tokens,
    )
    return build_layout(options.kv_layout, geometry, packed=options.pack_recurrent_planes)


def attention_of(
    options: EngineConfig, spec: ModelSpec, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> AttentionChoice:
    """Which kernels compute attention. Raises OptionError where what was asked for can't be had."""
    has_kernels = device.type == "cuda" and options.tick != "eager"
    return choose_attention(
        options.attention,
        AttentionFacts(
            capability=torch.cuda.get_device_capability(device) if has_kernels else None,
            plain_tick="a CPU" if device.type == "cpu" else "an eager tick",
            dtype=str(dtype).removeprefix("torch."),
            head_dim=spec.head_dim,
            page_tokens=options.page_tokens,
            page_bytes=layout.page_bytes,
            poison=options.poison,
            installed=installed_libraries() if has_kernels else frozenset(),
            late=late_reason(device) if has_kernels else "",
        ),
    )


def plan_engine_pool(
    options: EngineConfig, spec: ModelSpec, layout: KvLayout, device: torch.device, room_bytes: int = 0
) -> PoolPlan:
    """How the KV memory is spent; `room_bytes` is what a GPU has for it. Raises PlanRefused."""
    limit = min(options.context_tokens or spec.context_tokens, spec.context_tokens)
    fixed = slot_bytes(spec, limit, layout.geometry.element_bytes)
    room = options.kv_memory_bytes
    if not room and device.type == "cpu":
        window = pages_for(limit, options.page_tokens) * layout.page_bytes
        room = min(CPU_KV_BYTES, options.slots * (window + fixed))
    elif not room:
        room = room_bytes
    return plan_pool(
        PoolRequest(
            room_bytes=room,
            page_bytes=layout.page_bytes,
            page_tokens=options.page_tokens,
            context_limit_tokens=limit,
            context_is_auto=not options.context_tokens,
            slots=options.slots,
            fixed_bytes=fixed,
        )
    )


def host_pages(options: EngineConfig, pool: KvPool) -> int:
    """How many pages host memory holds for rows that are taken off the device: never more than the pool has."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most_bytes = options.host_kv_bytes or min(MOST_HOST_KV_BYTES, machine_bytes // 4)
    return min(pool.pages, most_bytes // pool.facts.page_bytes)


def host_prefix_pages(options: EngineConfig, pool: KvPool) -> int:
    """How many pages of cached prefixes host memory holds."""
    return options.host_prefix_bytes // pool.facts.page_bytes


def make_slots(
    slots: int,
    spec: ModelSpec,
    rule: exits.RuleEntry,
    context_tokens: int,
    page_tokens: int,
    zero_page: int,
    dtype: torch.dtype,
    device: torch.device,
    heads: HeadRows | None = None,
) -> SlotTable:
    """Columns of `slots` slots with nobody in them, over `heads` or head rows of their own."""
    return SlotTable(
        slots,
        spec,
        rule,
        context_tokens=context_tokens,
        page_tokens=page_tokens,
        zero_page=zero_page,
        dtype=dtype,
        device=device,
        heads=heads if heads is not None else HeadRows(slots, spec.hidden_size, dtype, device),
    )


def measure_room(
    options: EngineConfig,
    files: ModelFiles,
    model: LoopedModel,
    ops: TritonOps,
    layout: KvLayout,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress,
    flash: FlashParts,
) -> int:
    """Bytes that the KV pool may have on a GPU: what is free beside a tick that has shown what it needs."""
    from epicycle.engine import gpu

    spec, name = model.spec, rule_name_of(options, files, model.spec)
    rule = exits.load(name, rule_setup(options, files, spec, device))
    limit = min(options.context_tokens or spec.context_tokens, spec.context_tokens)

    def make_scratch_slots() -> SlotTable:
        return make_slots(options.slots, spec, exits.RULES[name], limit, options.page_tokens, 1, dtype, device)

    def make_scratch_tick(slots: SlotTable) -> tuple[DeviceTick, TickTensors]:
        tensors = make_tensors(slots, Ladder.of(options.slots, most_prompt_rows(options, device)))
        pool = KvPool(layout, 1, dtype, device)
        tick, _ = gpu.make_tick(
            model, ops, pool, tensors, rule, name, has_graphs=False, on_progress=lambda _: None, flash=flash
        )
        return tick, tensors

    room = gpu.measure_room(make_scratch_slots, make_scratch_tick, spec, device, has_graphs=options.graphs == "on")
    on_progress(room.line())
    return room.bytes


def most_prompt_rows(options: EngineConfig, device: torch.device) -> int:
    """Of one device tick."""
    return options.prompt_chunk_tokens or IDLE_CHUNK_TOKENS[device.type]


def make_ops(
    options: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, on_progress: Progress
) -> tuple[PlainOps | TiledOps | TritonOps, int]:
    """(operations, the multiple of rows they like); with invariant numerics they have been checked."""
    is_invariant = options.numerics == "invariant"
    if device.type != "cpu":
        from epicycle.engine import gpu

        row_counts = Ladder.of(options.slots, most_prompt_rows(options, device)).row_counts()
        return gpu.make_ops(spec, dtype, device, row_counts, on_progress, keeps_bits=is_invariant), 1
    if not is_invariant:
        return PlainOps(), 1
    chunk = options.prompt_chunk_tokens or PROMPT_CHUNK_TOKENS["cpu"]
    ops = choose_ops(spec, dtype, options.slots + chunk)
    layout = make_layout(options, spec, dtype)
    check_attention(KvPool(layout, pages_for(ATTENTION_TOKENS, options.page_tokens), dtype, device), spec.heads)
    return ops, ops.tiling.row_tile


def rule_name_of(options: EngineConfig, files: ModelFiles, spec: ModelSpec) -> str:
    has_lookahead = (files.folder / "lookahead.safetensors").is_file()
    return exits.resolve(options.exit_rule or None, spec.model_type, spec.has_gate, has_lookahead)


def rule_setup(options: EngineConfig, files: ModelFiles, spec: ModelSpec, device: torch.device) -> exits.RuleSetup:
    return exits.RuleSetup(
        hidden_size=spec.hidden_size,
        loops=read_spec(files.folder).loops,
        init_std=spec.init_std,
        random_seed=options.lookahead_seed,
        lookahead_path=files.folder / "lookahead.safetensors",
        device=str(device),
    )
