"""A device tick's steps through the GPU kernels: nothing here waits for the device, so graphs can hold all of it.

Owns which kernel serves which step, and which steps stay with their plain twins: exit rules with arithmetic of their
own, and sampling beyond the likeliest token. It must not know the order of a tick's steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.flash_attention import FlashParts
from epicycle.engine.frame import Frame
from epicycle.engine.kernels import tick_triton
from epicycle.engine.kernels.argmax_triton import argmax
from epicycle.engine.kernels.commit_triton import fill_deeper
from epicycle.engine.kernels.exit_triton import RULES, ExitColumns, Leavers, allocate_leavers, decide
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.fused import fuse, turns_pairs
from epicycle.engine.paged_attention import PagedAttention
from epicycle.engine.pool import KvPool
from epicycle.engine.read_out import Candidates, PlainLineUp
from epicycle.engine.settle import PlainSettle, TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_backend import RunLoop, TickBackend
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
    """Meets `read_out.LineUp` for models whose coda is no more than the row itself, and rules that keep no state of
    the last token."""

    def __init__(self, tensors: TickTensors) -> None:
        self._tensors = tensors

    def candidates(self, frame: Frame, *, has_ends: bool) -> Candidates:
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
        return Candidates(found, states, states, count)

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


def kernel_backend(
    model: LoopedModel,
    ops: TritonOps,
    pool: KvPool,
    tensors: TickTensors,
    rule: ExitRule,
    rule_name: str,
    needs: RuleEntry,
    flash: FlashParts,
) -> TickBackend:
    """A tick that never waits for the device."""
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
    commit = KernelCommit(pool)
    has_kernel_line_up = not model.spec.coda_layers and tensors.slots.previous_final is None
    return TickBackend(
        attention=attention,
        route=route,
        run_loop=_loop_runner(model, ops, attention),
        settle=KernelSettle(tensors, rule_name, commit)
        if rule_name in RULES
        else PlainSettle(tensors, rule, needs, commit),
        line_up=KernelLineUp(tensors) if has_kernel_line_up else PlainLineUp(model, tensors, attention),
        greedy=argmax,
    )


def _loop_runner(model: LoopedModel, ops: TritonOps, attention: PagedAttention) -> RunLoop:
    fused = fuse(model, ops)
    if fused is None:
        return lambda state, frame, wants_gate=True: model.loop(state, attention.rows(frame))
    return lambda state, frame, wants_gate=True: fused(state, attention.rows(frame), wants_gate=wants_gate)
