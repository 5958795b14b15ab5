"""A device tick's steps through the GPU kernels: nothing here waits for the device, so graphs can hold all of it.

Owns which kernel serves which step, and which steps stay with their plain twins: exit rules with arithmetic of their
own, and what happens beside prompts at either end of a traversal. It must not know the order of a tick's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.flash_attention import FlashParts
from epicycle.engine.frame import Frame
from epicycle.engine.kernels import sample_triton, tick_triton
from epicycle.engine.kernels.argmax_triton import argmax
from epicycle.engine.kernels.commit_triton import fill_deeper
from epicycle.engine.kernels.exit_triton import RULES, ExitColumns, Leavers, allocate_leavers, decide
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.fused import fuse, fuse_ends, turns_pairs
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.paged_attention import PagedAttention
from epicycle.engine.pool import KvPool
from epicycle.engine.read_out import Candidates, PlainLineUp, RunCoda
from epicycle.engine.sampler import Sampled
from epicycle.engine.sampling import SamplerSteps
from epicycle.engine.settle import PlainSettle, TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_backend import PlainEnter, RunLoop, RunPrelude, TickBackend
from epicycle.engine.tick_inputs import TickInputs, TickShape


def route(slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
    """Meets `tick_backend.Route`."""
    columns, live = tick_triton.route(
        inputs.decode_slots(shape.decode_rows),
        inputs.prompt_table(shape.prompt_rows),
        slots.position,
        slots.loops_done,
        slots.limit_tokens,
        slots.is_decoding,
        slots.noise_seed,
        slots.sink,
    )
    slot, positions, depths, seeds, ends = columns.unbind(0)
    return Frame(
        decode_rows=shape.decode_rows,
        prompt_rows=shape.prompt_rows,
        slots=slot,
        positions=positions,
        depths=depths,
        noise_seeds=seeds,
        ends=ends,
        live=live,
        chunks=inputs.chunks,
    )


class KernelEnter:
    """Meets `tick_backend.Enter`. Layers of a prelude run for the rows that start a token only, lined up; beside
    prompts for all rows at their places."""

    def __init__(self, spec: ModelSpec, sink: int, run_prelude: RunPrelude) -> None:
        self._has_layers = spec.first_recurrent > 0
        self._sink = sink
        self._run_prelude = run_prelude
        self._plain = PlainEnter(spec, run_prelude)

    def __call__(self, tokens: Tensor, frame: Frame, held: Tensor | None) -> Tensor:
        if held is None or frame.prompt_rows or not self._has_layers:
            return self._plain(tokens, frame, held)
        found, count = tick_triton.starters(
            frame.slots, frame.positions, frame.depths, frame.noise_seeds, frame.live, tokens, self._sink
        )
        row, slot, position, depth, seed, token = found.unbind(0)
        rows = replace(
            frame, slots=slot, positions=position, depths=depth, noise_seeds=seed, ends=position + 1,
            live=slot != self._sink,
        )  # fmt: skip
        tick_triton.put_rows(self._run_prelude(token, rows, count), row, count, held)
        return held


class KernelCommit:
    """Meets `settle.Commit`: fills planes from a device list of the rows that leave."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def __call__(self, slots: SlotTable, frame: Frame, leave: Tensor, done: Tensor) -> None:
        rows = torch.argsort(~leave, stable=True).to(torch.int32)
        count = leave.sum(dtype=torch.int32).view(1)
        self.fill(slots, frame, Leavers(rows, count, done.to(torch.int32)))

    def fill(self, slots: SlotTable, frame: Frame, leavers: Leavers) -> None:
        pool, geometry = self._pool, self._pool.geometry
        if pool.facts.planes == 1:
            return
        decode = frame.decode_rows
        at = RowAddresses(
            frame.slots[:decode].to(torch.int32),
            frame.positions[:decode].to(torch.int32),
            leavers.done,
            slots.page_table,
            pool.facts.slots_per_page,
        )
        fill_deeper(
            leavers, at, slots.max_loops, pool.plane_starts, pool.k, pool.v, geometry.first_recurrent,
            geometry.recurrent_layers,
        )  # fmt: skip


class KernelSettle:
    """Meets `settle.Settle` for the rules of `exit_triton.RULES`."""

    def __init__(self, tensors: TickTensors, rule_name: str, commit: KernelCommit) -> None:
        self._tensors = tensors
        self._rule_name = rule_name
        self._commit = commit
        slots = tensors.slots
        self._columns = ExitColumns(
            survival=slots.survival,
            pending=slots.pending,
            loops_done=slots.loops_done,
            threshold=slots.threshold,
            min_loops=slots.min_loops,
            max_loops=slots.max_loops,
            outputs=slots.outputs,
            trace=slots.trace,
        )

    def loop(self, frame: Frame, before: Tensor, after: Tensor, gate: Tensor | None) -> None:
        decode, slots = frame.decode_rows, self._tensors.slots
        if decode:
            slot = torch.where(frame.live[:decode], frame.slots[:decode], -1).to(torch.int32)
            leavers = allocate_leavers(decode, slots.device)
            decide(self._rule_name, slot, gate[:decode] if gate is not None else None, self._columns, leavers)
            self._commit.fill(slots, frame, leavers)
        self._store(frame, frame.depths, after)

    def token(self, frame: Frame, state: Tensor) -> None:
        self._store(frame, frame.depths + (self._tensors.slots.loops - 1), state)

    def _store(self, frame: Frame, depths: Tensor, after: Tensor) -> None:
        tensors, slots = self._tensors, self._tensors.slots
        tick_triton.settle(
            after,
            frame.slots,
            depths,
            frame.live,
            slots.loops_done,
            slots.ran,
            slots.left,
            slots.state,
            tensors.results.of_rows(frame.decode_rows),
            tensors.states,
            tensors.state_rows(frame),
        )


class KernelLineUp:
    """Meets `read_out.LineUp` for rules that keep no state of the last token.

    A coda runs for the rows that are due only, lined up; beside prompts, which need it for rows that are not due a
    token too, for all rows at their places.
    """

    def __init__(self, spec: ModelSpec, tensors: TickTensors, run_coda: RunCoda) -> None:
        self._has_coda = bool(spec.coda_layers)
        self._tensors = tensors
        self._run_coda = run_coda
        self._plain = PlainLineUp(spec, tensors, run_coda)

    def candidates(self, frame: Frame, *, has_ends: bool) -> Candidates:
        if self._has_coda and frame.prompt_rows:
            return self._plain.candidates(frame, has_ends=has_ends)
        tensors, slots, inputs = self._tensors, self._tensors.slots, self._tensors.inputs
        _, end_slots, end_states, end_positions = inputs.ends
        found, count = tick_triton.candidates(
            inputs.decode_slots(frame.decode_rows),
            slots.left,
            slots.ran,
            slots.position,
            (end_slots, end_positions) if has_ends else None,
            slots.sink,
            slots.loops,
        )
        ends = len(end_slots) if has_ends else 0
        states = tick_triton.gather_states(found, count, slots.state, tensors.states, end_states, ends)
        x = self._run_coda(states, self._due(frame, found), count) if self._has_coda else states
        return Candidates(found, states, x, count)

    def _due(self, frame: Frame, found: Tensor) -> Frame:
        """The decode rows of `frame` as lined up in `found` [4, B], those that aren't due inert."""
        _, slot, positions, depths = found.unbind(0)
        live = slot != self._tensors.slots.sink
        return replace(frame, slots=slot, positions=positions, depths=depths, ends=positions + 1, live=live)

    def feed_back(self, found: Candidates, tokens: Tensor, is_finite: Tensor) -> None:
        slots = self._tensors.slots
        tick_triton.feed_back(
            found.columns,
            found.count,
            tokens,
            is_finite,
            slots.sampling.stop_ids,
            slots.token,
            slots.position,
            slots.outputs,
            slots.max_tokens,
            slots.is_decoding,
            self._tensors.results.of_samples(found.columns.shape[1]),
        )


def sample(logits: Tensor, found: Candidates, slots: SlotTable, steps: SamplerSteps) -> Sampled:
    """Meets `read_out.Sample`: every row's own steps, whatever `steps` are."""
    tokens, is_finite, logprob, top_ids, top_logprobs = sample_triton.sample(
        logits, found.columns, found.count, slots.outputs, slots.sampling
    )
    return Sampled(tokens, logprob, top_ids, top_logprobs, is_finite.view(torch.bool))


def kernel_backend(
    model: LoopedModel,
    ops: TritonOps,
    pool: KvPool,
    tensors: TickTensors,
    rule: ExitRule,
    rule_name: str,
    needs: RuleEntry,
    flash: FlashParts,
    on_progress: Callable[[str], None],
) -> TickBackend:
    """A tick that never waits for the device. `on_progress` is told which kernels attend."""
    ladder, page_table = tensors.inputs.ladder, tensors.slots.page_table
    attention = PagedAttention(
        pool,
        page_table,
        model.spec.heads,
        decode_rows=ladder.decode[-1],
        prompt_rows=ladder.prompt[-1],
        flash=flash,
        turns_pairs=turns_pairs(model),
    )
    on_progress(attention.line())
    commit = KernelCommit(pool)
    run_prelude, run_coda = _end_runners(model, ops, attention)
    line_up = KernelLineUp if tensors.slots.previous_final is None else PlainLineUp
    return TickBackend(
        attention=attention,
        route=route,
        enter=KernelEnter(model.spec, tensors.slots.sink, run_prelude),
        run_loop=_loop_runner(model, ops, attention),
        run_coda=run_coda,
        settle=KernelSettle(tensors, rule_name, commit)
        if rule_name in RULES
        else PlainSettle(tensors, rule, needs, commit),
        line_up=line_up(model.spec, tensors, run_coda),
        greedy=argmax,
        sample=sample,
    )


def _loop_runner(model: LoopedModel, ops: TritonOps, attention: PagedAttention) -> RunLoop:
    fused = fuse(model, ops)
    if fused is None:
        return lambda state, frame, wants_gate=True: model.loop(state, attention.rows(frame))
    return lambda state, frame, wants_gate=True: fused(state, attention.rows(frame), wants_gate=wants_gate)


def _end_runners(model: LoopedModel, ops: TritonOps, attention: PagedAttention) -> tuple[RunPrelude, RunCoda]:
    fused = fuse_ends(model, ops)
    if fused is None:
        return (
            lambda tokens, frame, count=None: model.prelude(tokens, attention.rows(frame)),
            lambda state, frame, count=None: model.coda(state, attention.rows(frame)),
        )
    prelude, coda = fused
    return (
        lambda tokens, frame, count=None: prelude(tokens, attention.rows(frame), count),
        lambda state, frame, count=None: coda(state, attention.rows(frame), count),
    )
