"""What follows a loop of the core: the exit test, the KV of rows that leave, and the new states of all rows.

Owns the seam (`Settle`) and its plain side. Exit state and latent state of rows that ran go to the slots, prompt rows'
states to their rows; inert rows are marked and keep theirs. It must not know where the head is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitDecision, ExitRows, ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.frame import Frame
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import TickInputs
from epicycle.engine.tickets import ResultColumns

Commit = Callable[[SlotTable, Frame, Tensor, Tensor], None]
"""Fill the deeper planes of decode rows that leave [B] bool after so many loops [B] int64."""


@dataclass(frozen=True, slots=True)
class TickTensors:
    """What outlives a tick on the device: slots, inputs, prompt rows' states [state rows + 1, W], results."""

    slots: SlotTable
    inputs: TickInputs
    states: Tensor
    results: ResultColumns

    def state_rows(self, frame: Frame) -> Tensor:
        """[P] where the states of the prompt rows are."""
        return self.inputs.prompt_columns(frame.prompt_rows)[4]


class Settle(Protocol):
    def loop(self, frame: Frame, before: Tensor, after: Tensor, gate: Tensor | None) -> None:
        """After one loop of all rows; states [N, W], gate [N] float32."""
        ...

    def token(self, frame: Frame, state: Tensor) -> None:
        """After all loops of decode rows that all leave: there is nothing to decide, and no plane to fill."""
        ...


class PlainSettle:
    """Meets `Settle` for every rule."""

    def __init__(self, tensors: TickTensors, rule: ExitRule, needs: RuleEntry, commit: Commit) -> None:
        self._tensors = tensors
        self._slots = tensors.slots
        self._rule = rule
        self._needs = needs
        self._commit = commit

    def loop(self, frame: Frame, before: Tensor, after: Tensor, gate: Tensor | None) -> None:
        decode, slots = frame.decode_rows, self._slots
        if decode:
            decision = self._decide(frame, before, after, gate)
            live, done = frame.live[:decode], frame.depths[:decode] + 1
            to = torch.where(live, frame.slots[:decode], slots.sink)
            slots.survival[to] = decision.survival
            slots.pending[to] = decision.pending
            slots.loops_done[to] = torch.where(decision.leave, 0, done)
            slots.state[to] = after[:decode]
            self._mark(frame.slots[:decode], torch.where(live, done, 0), decision.leave & live)
            self._commit(slots, frame, decision.leave & live, done)
        if frame.prompt_rows:
            self._tensors.states[self._tensors.state_rows(frame)] = after[decode:]

    def token(self, frame: Frame, state: Tensor) -> None:
        slots, live = self._slots, frame.live
        slots.state[torch.where(live, frame.slots, slots.sink)] = state
        self._mark(frame.slots, live * slots.loops, live)

    def _mark(self, slot: Tensor, ran: Tensor, left: Tensor) -> None:
        self._slots.ran[slot] = ran
        self._slots.left[slot] = left
        self._tensors.results.write_rows(ran, left)

    def _decide(self, frame: Frame, before: Tensor, after: Tensor, gate: Tensor | None) -> ExitDecision:
        decode, slots, needs = frame.decode_rows, self._slots, self._needs
        slot = frame.slots[:decode]
        return self._rule.decide(
            ExitRows(
                loops_done=frame.depths[:decode] + 1,
                survival=slots.survival[slot],
                pending=slots.pending[slot],
                threshold=slots.threshold[slot],
                min_loops=slots.min_loops[slot],
                max_loops=slots.max_loops[slot],
                state_after=after[:decode],
                state_before=before[:decode] if needs.needs_state_before else None,
                gate=gate[:decode] if gate is not None else None,
                previous_final=slots.previous_final[slot] if slots.previous_final is not None else None,
                traced_depth=self._traced(slot),
            )
        )

    def _traced(self, slot: Tensor) -> Tensor | None:
        trace = self._slots.trace
        if trace is None:
            return None
        return trace[slot, self._slots.outputs[slot].clamp(max=trace.shape[1] - 1)]
