"""The end of a device tick: which rows get a token, the head, the sampler, and what goes back to the slots.

Owns the order of these steps on the device, without a host value: rows that left (`SlotTable.left`) and prompts that
end are lined up, samples first; the head and the greedy sampler read how many there are. It must not know how a row
came to leave, nor messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.frame import Frame, FrameAttention
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.sampler import sample, stops
from epicycle.engine.sampling import SampleRows, SamplerSteps
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import MOST_CHUNKS, TickInputs
from epicycle.engine.tickets import Reports, ResultColumns


class Greedy(Protocol):
    def __call__(self, logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [M] int64, is finite [M]) of logits [M, V]; from row `count` [1] on they mean nothing."""
        ...


def plain_greedy(logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(dim=-1), torch.isfinite(logits).all(dim=-1)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """M candidates, those to be sampled first. All [M] int64 but `x` [M, H], `is_due` [M] bool and `count` [1]."""

    number: Tensor
    slots: Tensor
    positions: Tensor
    depths: Tensor
    states: Tensor
    x: Tensor
    is_due: Tensor
    count: Tensor


class ReadOut:
    """`states` [state rows + 1, W] are the prompt rows' states."""

    def __init__(
        self,
        model: LoopedModel,
        slots: SlotTable,
        inputs: TickInputs,
        states: Tensor,
        results: ResultColumns,
        greedy: Greedy = plain_greedy,
    ) -> None:
        self._model = model
        self._slots = slots
        self._inputs = inputs
        self._states = states
        self._results = results
        self._greedy = greedy

    def head_inputs(self, frame: Frame, attention: FrameAttention) -> tuple[Tensor, Tensor]:
        """(states, head inputs) of all rows after their last loop. Only rows that are done mean anything: those whose
        coda runs are decode rows that left and prompt rows at the model's last loop."""
        decode = frame.decode_rows
        states = torch.cat((self._slots.state[frame.slots[:decode]], self._states[self._prompt_rows(frame)]))
        if not self._model.spec.coda_layers:
            return states, self._model.coda(states, attention.rows(frame))
        is_done = torch.cat((self._slots.left[frame.slots[:decode]], frame.depths[decode:] == self._slots.loops - 1))
        return states, self._model.coda(states, attention.rows(frame.only(is_done)))

    def _prompt_rows(self, frame: Frame) -> Tensor:
        return self._inputs.prompt_columns(frame.prompt_rows)[4]

    def greedy(self, frame: Frame, states: Tensor, x: Tensor, *, has_ends: bool) -> None:
        """The likeliest token of every row that is due one."""
        found = self._candidates(frame, states, x, has_ends)
        tokens, is_finite = self._greedy(self._model.head(found.x, found.count), found.count)
        is_stop = (tokens.unsqueeze(1) == self._slots.sampling.stop_ids[found.slots]).any(dim=1)
        self._feed_back(found, tokens, is_finite.to(torch.bool), is_stop)

    def sampled(self, frame: Frame, states: Tensor, x: Tensor, steps: SamplerSteps, *, has_ends: bool) -> Reports:
        """A token of every row that is due one, by all of `steps`."""
        found, slots = self._candidates(frame, states, x, has_ends), self._slots
        rows: SampleRows = slots.sampling.gather(found.slots, found.positions + 1, slots.outputs[found.slots], steps)
        sampled = sample(self._model.head(found.x, found.count), rows, steps)
        if steps.penalise:
            slots.sampling.count(found.slots, sampled.tokens, sampled.is_finite & found.is_due)
        self._feed_back(found, sampled.tokens, sampled.is_finite, stops(sampled.tokens, rows))
        return Reports(sampled.logprob, sampled.top_ids, sampled.top_logprobs)

    def _candidates(self, frame: Frame, states: Tensor, x: Tensor, has_ends: bool) -> _Candidates:
        slots, decode = self._slots, frame.decode_rows
        slot = frame.slots[:decode]
        is_due, row = slots.left[slot], torch.arange(decode, device=slot.device)
        depths = slots.ran[slot]
        if has_ends:
            end_row, end_slot, _ = self._inputs.ends
            is_due = torch.cat((is_due, end_slot != slots.sink))
            row = torch.cat((row, end_row + decode))
            slot = torch.cat((slot, end_slot))
            depths = torch.cat((depths, torch.full_like(end_slot, slots.loops)))
        number = torch.argsort(~is_due, stable=True)  # samples first, in the order of the rows
        row, slot, is_due = row[number], slot[number], is_due[number]
        return _Candidates(
            number=number,
            slots=torch.where(is_due, slot, slots.sink),
            positions=frame.positions[row],
            depths=depths[number],
            states=states[row],
            x=x[row],
            is_due=is_due,
            count=is_due.sum(dtype=torch.int32).view(1),
        )

    def _feed_back(self, found: _Candidates, tokens: Tensor, is_finite: Tensor, is_stop: Tensor) -> None:
        """Token, position and count go back to the slots, and whether the request goes on; results to the host."""
        slots, to = self._slots, found.slots
        outputs = slots.outputs[to] + 1
        slots.token[to] = tokens
        slots.position[to] = found.positions + 1
        slots.outputs[to] = outputs
        slots.is_decoding[to] = found.is_due & is_finite & ~is_stop & (outputs < slots.max_tokens[to])
        if slots.previous_final is not None:
            slots.previous_final[to] = found.states[:, : self._model.spec.hidden_size]
        self._results.write_samples(found.count, [found.number, tokens, found.depths, is_finite, is_stop])


def candidates(decode_rows: int, has_ends: bool) -> int:
    """How many there are for a tick's shape."""
    return decode_rows + (MOST_CHUNKS if has_ends else 0)
