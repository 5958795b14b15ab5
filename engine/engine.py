"""`Engine`: everything on torch that one executor needs, loaded once and kept over resets.

Owns the order of loading (numerics, model, pool, rule, graphs,
pump), the facts it reports as `Capabilities`, and the canary that decodes one token before anyone is served.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from epicycle.engine.attention_choice import AttentionChoice
from epicycle.engine.device_tick import DeviceTick, make_tensors
from epicycle.engine.errors import EngineError
from epicycle.engine.exits import registry as exits
from epicycle.engine.flash_attention import FlashParts, load_flash
from epicycle.engine.graph_runner import PlainRunner, RunCounters
from epicycle.engine.heads import HeadRows
from epicycle.engine.host_pages import make_mover
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.tiled import TiledOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.build import assemble, weights_fingerprint
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.loader import load_weights, random_weights
from epicycle.engine.models.locate import ModelFiles, locate
from epicycle.engine.models.locate import Weights as WeightSource
from epicycle.engine.pool import KvPool
from epicycle.engine.pump import Pump
from epicycle.engine.sampling import MAX_ALTERNATIVES
from epicycle.engine.setup import (
    PROMPT_CHUNK_TOKENS,
    attention_of,
    host_pages,
    host_prefix_pages,
    make_layout,
    make_ops,
    make_slots,
    measure_room,
    memory_errors,
    most_prompt_rows,
    plan_engine_pool,
    resolve_device,
    resolve_dtype,
    rule_name_of,
    rule_setup,
    serve_loops,
)
from epicycle.engine.slots import MAX_LOGIT_BIAS, MAX_STOP_IDS, SlotTable
from epicycle.engine.tick import EagerTick, Tick
from epicycle.engine.tick_backend import plain_backend
from epicycle.engine.tick_inputs import Ladder
from epicycle.engine.transfer.connectors import make_connector
from epicycle.engine.transfer.facts import facts_of, weights_checksum
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.port import TransferPort
from epicycle.kvstore.plan import GIB, PoolPlan
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.config import EngineConfig, TransferConfig
from epicycle.transport.link import Receiver
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.output import Fin, TokenBatch
from epicycle.transport.wire.plan import Join, Plan
from epicycle.transport.wire.request import LoopBounds, Sampling
from epicycle.transport.wire.transfer import ToPeer

if TYPE_CHECKING:
    from epicycle.engine.graphs import CaptureReport
    from epicycle.engine.kernels.triton_ops import TritonOps

STAGING_PAGES = 16  # of cached prefixes on their way to the host at once
KEPT_HEADS = 256  # head rows of prompts that may be repeated; a few MiB

Progress = Callable[[str], None]


class Engine:
    """A loaded model with its pool and resident state. `load` makes one; `new_pump` starts an epoch on it."""

    def __init__(
        self, options: EngineConfig, files: ModelFiles, model: LoopedModel, pool: KvPool, plan: PoolPlan, row_tile: int
    ) -> None:
        self.options = options
        self.files = files
        self.model = model
        self.spec = model.spec
        self.pool = pool
        self.plan = plan
        self.device = pool.device
        self.chunk_tokens = options.prompt_chunk_tokens or PROMPT_CHUNK_TOKENS[self.device.type]
        self.rule_name = rule_name_of(options, files, self.spec)
        self.rule_entry = exits.RULES[self.rule_name]
        self.rule = exits.load(self.rule_name, rule_setup(options, files, self.spec, self.device))
        self.heads = HeadRows(plan.slots + KEPT_HEADS, self.spec.hidden_size, pool.k.dtype, self.device)
        self._row_tile = row_tile
        self.weights_checksum = ""
        self.ops_line = f"{row_tile} rows at once"
        self.port: TransferPort | None = None
        self._transfer_config = TransferConfig()
        self._host_pages, self._host_prefix_pages = host_pages(options, pool), host_prefix_pages(options, pool)
        staging_pages = min(STAGING_PAGES, self._host_prefix_pages)
        self._mover = make_mover(pool, self._host_pages + self._host_prefix_pages, staging_pages)
        kind = options.tick if options.tick != "auto" else "eager" if self.device.type == "cpu" else "device"
        self._has_device_tick = kind == "device"
        self._most_prompt_rows = most_prompt_rows(options, self.device)
        self._device_tick: tuple[SlotTable, DeviceTick] | None = None
        self._triton_ops: TritonOps | None = None
        self._flash = FlashParts()
        self.attention: AttentionChoice | None = None  # None for an engine that was put together by hand
        self.capture: CaptureReport | None = None  # of the graphs, once they are there

    @classmethod
    def load(cls, options: EngineConfig, on_progress: Progress = lambda _: None) -> Engine:
        """Load everything. Raises EngineError, or KvError where the pool can't be planned."""
        device = resolve_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # kernels are launched on the current device
        torch.set_num_threads(options.cpu_threads)
        source: WeightSource = "random" if options.weights == "random" else "checkpoint"
        files = locate(options.model, source)
        published = read_spec(files.folder)
        spec = serve_loops(published, options.loops)
        dtype = resolve_dtype(options.dtype, device)
        layout = make_layout(options, spec, dtype)
        attention = attention_of(options, spec, layout, dtype, device)
        on_progress(attention.line())
        flash = load_flash(attention)
        on_progress("checking numerics")
        ops, row_tile = make_ops(options, spec, dtype, device, on_progress)
        on_progress(f"loading {source} weights of {files.served_id}")
        with memory_errors(f"the weights of {files.served_id}"):
            if source == "random":
                tensors = random_weights(published, seed=options.random_seed, dtype=dtype, device=device)
            else:
                tensors = load_weights(files.folder, published, dtype=dtype, device=device)
        checksum = weights_checksum(tensors)
        model = assemble(spec, tensors, ops, options.start_state)
        on_progress("planning the KV pool")
        triton_ops = None if isinstance(ops, PlainOps | TiledOps) else ops
        room_bytes = 0
        if triton_ops is not None and not options.kv_memory_bytes:
            with memory_errors("the work of a tick"):
                room_bytes = measure_room(options, files, model, triton_ops, layout, dtype, device, on_progress, flash)
        plan = plan_engine_pool(options, spec, layout, device, room_bytes)
        with memory_errors(plan.line()):
            pool = KvPool(layout, plan.total_pages, dtype, device)
            engine = cls(options, files, model, pool, plan, row_tile)
            engine._triton_ops, engine._flash, engine.attention = triton_ops, flash, attention
            engine.weights_checksum = checksum
            if isinstance(ops, TiledOps):
                engine.ops_line = str(ops.tiling)
            engine.prepare(on_progress)
        return engine

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """What the start-up check chose to run matrix products by, as `ladder.Choices.told`; nothing on a CPU."""
        return self._triton_ops.products if self._triton_ops is not None else {}

    @property
    def run_counters(self) -> RunCounters | None:
        """How device ticks were run so far; None before the first pump and where ticks are eager."""
        return self._device_tick[1].counters if self._device_tick is not None else None

    def beat_counters(self) -> dict[str, float]:
        """What an executor's heartbeats add to /metrics; any thread."""
        is_cuda, runs, capture = self.device.type == "cuda", self.run_counters or RunCounters(), self.capture
        return {
            "vram_bytes": float(torch.cuda.memory_reserved(self.device)) if is_cuda else 0.0,
            'tick_parts_total{way="graph"}': float(runs.replays),
            'tick_parts_total{way="eager"}': float(runs.eager_parts),
            "padding_rows_total": float(runs.padding_rows),
            "whole_token_ticks_total": float(runs.whole_tokens),
            "graph_bytes": float(capture.bytes) if capture else 0.0,
            "graph_capture_seconds": capture.seconds if capture else 0.0,
            **(self.port.counters() if self.port is not None else {}),
        }

    def new_pump(
        self, epoch: int, clock: Callable[[], float] = time.monotonic, watch: Callable[[Tick], Tick] | None = None
    ) -> Pump:
        """A pump with empty slots. Pumps share the pool: use one at a time. `watch` stands before its tick."""
        slots, tick = self._new_tick()
        return self.make_pump(slots, tick if watch is None else watch(tick), epoch, clock)

    def open_port(self, config: TransferConfig, name: str, epoch: int, receiver: Receiver[ToPeer]) -> TransferPort:
        """The way to exchange KV with other executors, for pumps made from now on. Raises EngineError."""
        connector = make_connector(config, Memory.of(self.pool, self.heads), name, epoch)
        self.port = TransferPort(connector, name, epoch, receiver, config)
        self._transfer_config = config
        return self.port

    def make_pump(
        self,
        slots: SlotTable,
        tick: Tick,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> Pump:
        """A pump over a tick of one's own on `slots`, which nobody else uses."""
        return Pump(
            tick,
            slots,
            self.pool,
            self._mover,
            epoch=epoch,
            slot_count=self.plan.slots,
            loops=self.spec.loops,
            chunk_tokens=self.chunk_tokens,
            fixed_depth=self._is_fixed_depth,
            run_ahead_ticks=self.options.run_ahead_ticks,
            poison=self.options.poison,
            transfers=self.port,
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

        assert self._triton_ops is not None, "a GPU's operations are kernels"
        tick, self.capture = gpu.make_tick(
            self.model,
            self._triton_ops,
            self.pool,
            tensors,
            self.rule,
            self.rule_name,
            has_graphs=self.options.graphs == "on",
            on_progress=on_progress,
            flash=self._flash,
        )
        self._device_tick = slots, tick

    def new_slots(self) -> SlotTable:
        """Columns for this engine's slots, with nobody in them."""
        return make_slots(
            self.plan.slots,
            self.spec,
            self.rule_entry,
            self.plan.context_tokens,
            self.pool.page_tokens,
            self.pool.zero_page,
            self.pool.k.dtype,
            self.device,
            self.heads,
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

    def _plan_lines(self) -> list[str]:
        pages = self._host_pages
        host = f"host pages for preempted requests: {pages:,} = {pages * self.plan.page_bytes / GIB:.2f} GiB"
        return [self.plan.line(), host, *([self.capture.line()] if self.capture else [])]

    def capabilities(self) -> Capabilities:
        """The facts the others validate and account by."""
        facts, entry = self.pool.facts, self.rule_entry
        source: WeightSource = "random" if self.options.weights == "random" else "checkpoint"
        fingerprint = weights_fingerprint(self.files, weights=source, seed=self.options.random_seed)
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
            fingerprint=fingerprint,
            versions=[f"torch {torch.__version__}", f"python {platform.python_version()}"],
            plan_line="; ".join(self._plan_lines()),
            max_logprobs=MAX_ALTERNATIVES,
            max_stop_ids=MAX_STOP_IDS,
            max_logit_bias=MAX_LOGIT_BIAS,
            attention=self.attention.line() if self.attention else "",
            graphs=self.capture.graphs if self.capture else 0,
            graph_bytes=self.capture.bytes if self.capture else 0,
            graph_ms=round(self.capture.seconds * 1e3) if self.capture else 0,
            host_pages=self._host_pages,
            host_prefix_pages=self._host_prefix_pages,
            most_spills=STAGING_PAGES,
            plan_terms=self.plan.terms(),
            kept_heads=KEPT_HEADS,
            transfer=facts_of(self, self._transfer_config, fingerprint) if self.port is not None else None,
        )
