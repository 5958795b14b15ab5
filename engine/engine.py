"""`Engine`: everything on torch that one executor needs, loaded once and kept over resets.

Owns the resolution of options against the model and the machine, the order of loading (model, numerics, pool, rule,
pump), the facts it reports as `Capabilities`, and the canary that decodes one token before anyone is served.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from epicycle.engine.device_tick import DeviceTick, make_tensors
from epicycle.engine.errors import EngineError, OptionError
from epicycle.engine.exits import registry as exits
from epicycle.engine.graph_runner import PlainRunner, RunCounters
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.tiled import TiledOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.build import assemble, weights_fingerprint
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.loader import load_weights, random_weights
from epicycle.engine.models.locate import ModelFiles, locate
from epicycle.engine.models.locate import Weights as WeightSource
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.options import EngineOptions
from epicycle.engine.pool import KvPool
from epicycle.engine.pump import Pump
from epicycle.engine.sampling import MAX_ALTERNATIVES
from epicycle.engine.selfcheck import ATTENTION_TOKENS, check_attention, choose_ops
from epicycle.engine.slots import MAX_LOGIT_BIAS, MAX_STOP_IDS, SlotTable, slot_bytes
from epicycle.engine.tick import EagerTick, Tick
from epicycle.engine.tick_backend import plain_backend
from epicycle.engine.tick_inputs import Ladder
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import KvLayout, build_layout
from epicycle.kvstore.plan import PoolPlan, PoolRequest, plan_pool
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.output import Fin, TokenBatch
from epicycle.transport.wire.plan import Join, Plan
from epicycle.transport.wire.request import LoopBounds, Sampling

if TYPE_CHECKING:
    from epicycle.engine.graphs import CaptureReport
    from epicycle.engine.kernels.triton_ops import TritonOps

CPU_KV_BYTES = 512 << 20
GPU_KV_SHARE = 0.9  # of what is free once the weights are loaded
PROMPT_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}
IDLE_CHUNK_TOKENS = {"cpu": 64, "cuda": 2048}  # where nothing decodes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]


class Engine:
    """A loaded model with its pool and resident state. `load` makes one; `new_pump` starts an epoch on it."""

    def __init__(
        self, options: EngineOptions, files: ModelFiles, model: LoopedModel, pool: KvPool, plan: PoolPlan, row_tile: int
    ) -> None:
        self.options = options
        self.files = files
        self.model = model
        self.spec = model.spec
        self.pool = pool
        self.plan = plan
        self.device = pool.device
        self.chunk_tokens = options.prompt_chunk_tokens or PROMPT_CHUNK_TOKENS[self.device.type]
        self.rule_name = _rule_name(options, files, self.spec)
        self.rule_entry = exits.RULES[self.rule_name]
        self.rule = exits.load(self.rule_name, _rule_setup(options, files, self.spec, self.device))
        self._row_tile = row_tile
        kind = options.tick if options.tick != "auto" else "eager" if self.device.type == "cpu" else "device"
        self._has_device_tick = kind == "device"
        self._most_prompt_rows = options.prompt_chunk_tokens or IDLE_CHUNK_TOKENS[self.device.type]
        self._device_tick: tuple[SlotTable, DeviceTick] | None = None
        self._triton_ops: TritonOps | None = None
        self.capture: CaptureReport | None = None  # of the graphs, once they are there

    @classmethod
    def load(cls, options: EngineOptions, on_progress: Progress = lambda _: None) -> Engine:
        """Load everything. Raises EngineError, or KvError where the pool can't be planned."""
        device = resolve_device(options.device)
        torch.set_num_threads(options.cpu_threads)
        source: WeightSource = "random" if options.weights == "random" else "checkpoint"
        files = locate(options.model, source)
        published = read_spec(files.folder)
        spec = serve_loops(published, options.loops)
        dtype = resolve_dtype(options.dtype, device)
        on_progress("checking numerics")
        ops, row_tile = _make_ops(options, spec, dtype, device, on_progress)
        on_progress(f"loading {source} weights of {files.served_id}")
        if source == "random":
            tensors = random_weights(published, seed=options.random_seed, dtype=dtype, device=device)
        else:
            tensors = load_weights(files.folder, published, dtype=dtype, device=device)
        model = assemble(spec, tensors, ops, options.start_state)
        on_progress("planning the KV pool")
        layout = make_layout(options, spec, dtype)
        plan = plan_engine_pool(options, spec, layout, device)
        pool = KvPool(layout, plan.total_pages, dtype, device)
        engine = cls(options, files, model, pool, plan, row_tile)
        engine._triton_ops = None if isinstance(ops, PlainOps | TiledOps) else ops
        engine.prepare(on_progress)
        return engine

    @property
    def run_counters(self) -> RunCounters | None:
        """How device ticks were run so far; None before the first pump and where ticks are eager."""
        return self._device_tick[1].counters if self._device_tick is not None else None

    def new_pump(self, epoch: int, clock: Callable[[], float] = time.monotonic) -> Pump:
        """A pump with empty slots. Pumps share the pool: use one at a time."""
        return self.make_pump(*self._new_tick(), epoch, clock)

    def make_pump(self, slots: SlotTable, tick: Tick, epoch: int, clock: Callable[[], float] = time.monotonic) -> Pump:
        """A pump over a tick of one's own on `slots`, which nobody else uses."""
        return Pump(
            tick,
            slots,
            self.pool,
            epoch=epoch,
            slot_count=self.plan.slots,
            loops=self.spec.loops,
            chunk_tokens=self.chunk_tokens,
            fixed_depth=self._is_fixed_depth,
            run_ahead_ticks=self.options.run_ahead_ticks,
            poison=self.options.poison,
            clock=clock,
        )

    def _new_tick(self) -> tuple[SlotTable, Tick]:
        """Slots with nobody in them and a tick over them. On a GPU both are made once: graphs hold their addresses."""
        if not self._has_device_tick:
            slots = self.new_slots()
            return slots, EagerTick(self.model, self.pool, slots, self.rule, self.rule_entry, self._row_tile)
        self.prepare()
        assert self._device_tick is not None
        slots, tick = self._device_tick
        tick.new_epoch()
        return slots, tick

    def prepare(self, on_progress: Progress = lambda _: None) -> None:
        """Make the device tick, where ticks are such, and capture its graphs; `new_pump` does it otherwise."""
        if not self._has_device_tick or self._device_tick is not None:
            return
        slots = self.new_slots()
        tensors = make_tensors(slots, Ladder.of(self.plan.slots, self._most_prompt_rows))
        if self.device.type == "cpu":
            backend = plain_backend(self.model, self.pool, tensors, self.rule, self.rule_entry)
            self._device_tick = slots, DeviceTick(self.model, tensors, backend, PlainRunner())
            return
        from epicycle.engine import gpu

        tick, self.capture = gpu.make_tick(
            self.model,
            self._triton_ops,
            self.pool,
            tensors,
            self.rule,
            self.rule_name,
            has_graphs=self.options.graphs == "on",
            on_progress=on_progress,
        )
        self._device_tick = slots, tick

    def new_slots(self) -> SlotTable:
        """Columns for this engine's slots, with nobody in them."""
        return SlotTable(
            self.plan.slots,
            self.spec,
            self.rule_entry,
            context_tokens=self.plan.context_tokens,
            page_tokens=self.pool.page_tokens,
            zero_page=self.pool.zero_page,
            dtype=self.pool.k.dtype,
            device=self.device,
        )

    def _is_fixed_depth(self, exit_threshold: float) -> bool:
        """Whether every token of a request with this threshold takes all its loops."""
        entry = self.rule_entry
        return not entry.needs_trace and (not entry.adaptive or exit_threshold >= 1.0)

    def canary(self) -> None:
        """Decode tokens end to end on a pump of its own; raises EngineError where that fails."""
        outputs = 2 if self.plan.context_tokens > 2 else 1
        pages = list(range(pages_for(outputs, self.pool.page_tokens)))
        join = Join(
            rid=1,
            gateway=0,
            slot=0,
            gen=1,
            prompt=pack(I32, [self.spec.vocab_size // 2]),
            pages=pack(I32, pages),
            limit_tokens=outputs,
            sampling=Sampling(max_tokens=outputs, temperature=0.0),
            loops=LoopBounds(),
            noise_seed=self.options.noise_seed,
        )
        pump = self.new_pump(epoch=0)
        pump.apply(Plan(epoch=0, seq=1, joins=[join]))
        ends: list[Fin] = []
        tokens = 0
        while not ends:
            pump.tick()
            for message in pump.collect().to_gateways.get(0, []):
                if isinstance(message, Fin):
                    ends.append(message)
                elif isinstance(message, TokenBatch):
                    tokens += len(message.tokens) // 4
        if ends[0].reason != "length" or tokens != outputs:
            raise EngineError("canary_failed", f"the start-up request ended with {ends[0]}, {tokens} tokens")

    def capabilities(self) -> Capabilities:
        """The facts the others validate and account by."""
        facts, entry = self.pool.facts, self.rule_entry
        source: WeightSource = "random" if self.options.weights == "random" else "checkpoint"
        return Capabilities(
            model_id=self.files.served_id,
            model_type=self.spec.model_type,
            vocab_size=self.spec.vocab_size,
            context_tokens=min(self.plan.context_tokens, self.plan.total_pages * facts.page_tokens),
            model_context_tokens=self.spec.context_tokens,
            loops=self.spec.loops,
            eos_ids=pack(I32, self.spec.eos_ids),
            exit_rule=self.rule_name,
            can_exit_early=entry.adaptive,
            slots=self.plan.slots,
            total_pages=self.plan.total_pages,
            page_tokens=facts.page_tokens,
            page_bytes=facts.page_bytes,
            bytes_per_token=facts.bytes_per_token,
            kv_layout=self.options.kv_layout,
            planes=facts.planes,
            dtype=str(self.pool.k.dtype).removeprefix("torch."),
            device=str(self.device),
            prompt_chunk_tokens=self.chunk_tokens,
            run_ahead_ticks=self.options.run_ahead_ticks if self._has_device_tick else 1,
            fingerprint=weights_fingerprint(self.files, weights=source, seed=self.options.random_seed),
            versions=[f"torch {torch.__version__}", f"python {platform.python_version()}"],
            plan_line=self.plan.line(),
            max_logprobs=MAX_ALTERNATIVES,
            max_stop_ids=MAX_STOP_IDS,
            max_logit_bias=MAX_LOGIT_BIAS,
        )


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


def make_layout(options: EngineOptions, spec: ModelSpec, dtype: torch.dtype) -> KvLayout:
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


def plan_engine_pool(options: EngineOptions, spec: ModelSpec, layout: KvLayout, device: torch.device) -> PoolPlan:
    """How the KV memory is spent. Raises PlanRefused."""
    limit = min(options.context_tokens or spec.context_tokens, spec.context_tokens)
    fixed = slot_bytes(spec, limit, layout.geometry.element_bytes)
    room = options.kv_memory_bytes
    if not room and device.type == "cpu":
        window = pages_for(limit, options.page_tokens) * layout.page_bytes
        room = min(CPU_KV_BYTES, options.slots * (window + fixed))
    elif not room:
        room = int(torch.cuda.mem_get_info(device)[0] * GPU_KV_SHARE)
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


def _make_ops(
    options: EngineOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device, on_progress: Progress
) -> tuple[PlainOps | TiledOps | TritonOps, int]:
    """(operations, the multiple of rows they like); with invariant numerics they have been checked."""
    if options.numerics == "fast":
        return PlainOps(), 1
    if device.type != "cpu":
        from epicycle.engine import gpu

        most_rows = options.slots + (options.prompt_chunk_tokens or PROMPT_CHUNK_TOKENS["cuda"])
        most_rows = max(most_rows, options.prompt_chunk_tokens or IDLE_CHUNK_TOKENS["cuda"])
        return gpu.make_ops(spec, dtype, device, most_rows, on_progress), 1
    chunk = options.prompt_chunk_tokens or PROMPT_CHUNK_TOKENS["cpu"]
    ops = choose_ops(spec, dtype, options.slots + chunk)
    layout = make_layout(options, spec, dtype)
    check_attention(KvPool(layout, pages_for(ATTENTION_TOKENS, options.page_tokens), dtype, device), spec.heads)
    return ops, ops.tiling.row_tile


def _rule_name(options: EngineOptions, files: ModelFiles, spec: ModelSpec) -> str:
    has_lookahead = (files.folder / "lookahead.safetensors").is_file()
    return exits.resolve(options.exit_rule or None, spec.model_type, spec.has_gate, has_lookahead)


def _rule_setup(options: EngineOptions, files: ModelFiles, spec: ModelSpec, device: torch.device) -> exits.RuleSetup:
    return exits.RuleSetup(
        hidden_size=spec.hidden_size,
        loops=read_spec(files.folder).loops,
        init_std=spec.init_std,
        random_seed=options.lookahead_seed,
        lookahead_path=files.folder / "lookahead.safetensors",
        device=str(device),
    )
