# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The exit test of a tick on the device: who leaves, and the list of them that later kernels walk.

Owns the kernel for the rules that need no state of their own (`fixed`, `trace`, `ouro`, `ouro_delayed`), with the
arithmetic and the order of `engine.exits`, and the compaction of leavers in row order. All float32; products and sums
are kept apart (no fusing), because F is 1 minus the ROUNDED survival. Must not know KV, pages or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epicycle.engine.kernels.triton_common import next_power

FIXED = tl.constexpr(0)
TRACE = tl.constexpr(1)
OURO = tl.constexpr(2)
OURO_DELAYED = tl.constexpr(3)
RULES = {"fixed": 0, "trace": 1, "ouro": 2, "ouro_delayed": 3}
"""Rules of `engine.exits.registry` that have a kernel."""


@dataclass(frozen=True, slots=True)
class ExitColumns:
    """Columns with one entry a slot, as `SlotTable` holds them: int64, survival and threshold float32.

    `trace` [slots, outputs] int64 and `outputs` are read by rule `trace` alone. The kernel writes survival, pending
    and loops_done.
    """

    survival: Tensor
    pending: Tensor
    loops_done: Tensor
    threshold: Tensor
    min_loops: Tensor
    max_loops: Tensor
    outputs: Tensor
    trace: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Leavers:
    """`rows` [N] int32: indices of rows that leave, ascending, the first `count` [1] int32 of them in use;
    `done` [N] int32: loops each row has run, this one included."""

    rows: Tensor
    count: Tensor
    done: Tensor


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["gate_ptr", "slots_ptr", "leaver_ptr", "count_ptr", "done_ptr"],
)
def exit_kernel(
    gate_ptr, slots_ptr, survival_ptr, pending_ptr, loops_done_ptr, threshold_ptr, min_ptr, max_ptr,
    trace_ptr, outputs_ptr, leaver_ptr, count_ptr, done_ptr, rows, trace_stride,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program over all rows; rows whose slot is negative neither leave nor change anything."""
    row = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    live = slot >= 0
    done = tl.load(loops_done_ptr + slot, mask=live, other=0) + 1
    most = tl.load(max_ptr + slot, mask=live, other=0)
    survival = tl.load(survival_ptr + slot, mask=live, other=1.0)
    pending = tl.load(pending_ptr + slot, mask=live, other=0)
    leave = done >= most
    if RULE == TRACE:
        output = tl.load(outputs_ptr + slot, mask=live, other=0)
        leave = leave | (done >= tl.load(trace_ptr + slot * trace_stride + output, mask=live, other=0))
    if RULE >= OURO:
        hazard = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(gate_ptr + row, mask=live, other=0.0)))
        survival = survival * (1.0 - hazard)
        threshold = tl.load(threshold_ptr + slot, mask=live, other=1.0)
        least = tl.load(min_ptr + slot, mask=live, other=0)
        reached = (1.0 - survival >= threshold) & (threshold < 1.0) & (done >= least)
        if RULE == OURO:
            leave = leave | reached
        else:
            leave = leave | ((pending > 0) & (done >= pending))
            pending = tl.where(reached, done + 1, 0)
    leave = leave & live
    tl.store(survival_ptr + slot, tl.where(leave, 1.0, survival), mask=live)
    tl.store(pending_ptr + slot, tl.where(leave, 0, pending), mask=live)
    tl.store(loops_done_ptr + slot, tl.where(leave, 0, done), mask=live)
    tl.store(done_ptr + row, done.to(tl.int32), mask=row < rows)
    ones = leave.to(tl.int32)
    place = tl.cumsum(ones, axis=0) - 1
    tl.store(leaver_ptr + place, row, mask=leave)
    tl.store(count_ptr, tl.sum(ones, axis=0))


def allocate_leavers(rows: int, device: torch.device) -> Leavers:
    """For up to `rows` rows."""
    made = torch.zeros(2 * rows + 1, dtype=torch.int32, device=device)
    return Leavers(made[:rows], made[rows : rows + 1], made[rows + 1 :])


def decide(rule: str, slots: Tensor, gate: Tensor | None, columns: ExitColumns, leavers: Leavers) -> None:
    """Test rows with slots [N] int32 (negative: padding) right after a loop; `gate` [N] float32 where the rule asks.

    Fills `leavers`, stores survival, pending and loops done of every live row; those that leave start afresh.
    """
    assert gate is not None or rule not in ("ouro", "ouro_delayed"), rule
    assert columns.trace is not None or rule != "trace"
    rows, trace = slots.shape[0], columns.trace
    exit_kernel[(1,)](
        columns.survival if gate is None else gate,
        slots,
        columns.survival,
        columns.pending,
        columns.loops_done,
        columns.threshold,
        columns.min_loops,
        columns.max_loops,
        columns.pending if trace is None else trace,
        columns.outputs,
        leavers.rows,
        leavers.count,
        leavers.done,
        rows,
        0 if trace is None else trace.stride(0),
        RULE=RULES[rule],
        BLOCK=next_power(rows),
        enable_fp_fusion=False,
        num_warps=4,
    )
