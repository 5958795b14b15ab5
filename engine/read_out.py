"""The end of a device tick: which rows get a token, the head, the sampler, and what goes back to the slots.

Owns the order of these steps on the device, without a host value: rows that left (`SlotTable.left`) and prompts that
end are lined up, those due a token first; the head and the sampler read how many there are. It must not know how a row
came to leave, nor messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.frame import Frame
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.sampler import Sampled, sample
from epicycle.engine.sampling import SamplerSteps
from epicycle.engine.settle import TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import MOST_CHUNKS
from epicycle.engine.tickets import Reports


@dataclass(frozen=True, slots=True)
class Candidates:
    """M rows that may be due a token, the first `count` [1] int32 of them due. States [M, W], head inputs `x` [M, H].

    `columns` [4, M] int64: candidate number (decode rows, then prompts' ends), slot (the sink where none is due), the
    position of the token that has run, and its loops.
    """

    columns: Tensor
    states: Tensor
    x: Tensor
    count: Tensor


class LineUp(Protocol):
    def candidates(self, frame: Frame, *, has_ends: bool) -> Candidates:
        """The rows of a tick that has settled; with `has_ends` prompts that end are among them."""
        ...

    def feed_back(self, found: Candidates, tokens: Tensor, is_finite: Tensor) -> None:
        """Tokens [M] of the rows that are due one: to the slots, with whether the request goes on, and to the host."""
        ...


class Greedy(Protocol):
    def __call__(self, logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [M] int64, is finite [M]) of logits [M, V]; from row `count` [1] on they mean nothing."""
        ...


def plain_greedy(logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(dim=-1), torch.isfinite(logits).all(dim=-1)


class Sample(Protocol):
    def __call__(self, logits: Tensor, found: Candidates, slots: SlotTable, steps: SamplerSteps) -> Sampled:
        """A token for each row of logits [M, V] that is due one, by `steps` or more, counted where its slot penalises.
        The report has at least as many alternatives as `steps`. Rows that aren't due mean nothing; their tokens are
        some in the vocabulary."""
        ...


def plain_sample(logits: Tensor, found: Candidates, slots: SlotTable, steps: SamplerSteps) -> Sampled:
    _, to, positions, _ = found.columns.unbind(0)
    sampled = sample(logits, slots.sampling.gather(to, positions + 1, slots.outputs[to], steps), steps)
    if steps.penalise:
        is_due = torch.arange(len(to), device=to.device) < found.count
        slots.sampling.count(to, sampled.tokens, sampled.is_finite & is_due)
    return sampled


class RunCoda(Protocol):
    def __call__(self, state: Tensor, frame: Frame, count: Tensor | None = None) -> Tensor:
        """`LoopedModel.coda` of the frame's rows; what comes out for inert rows means nothing. Those from `count` [1]
        int32 on are all inert, and cost little."""
        ...


def head_inputs(spec: ModelSpec, tensors: TickTensors, frame: Frame, run_coda: RunCoda) -> tuple[Tensor, Tensor]:
    """(states, head inputs) of all rows after their last loop.

    They mean something for rows that are done: decode rows that left, and prompt rows at the model's last loop. The
    coda runs for those only.
    """
    slots, decode = tensors.slots, frame.decode_rows
    states = torch.cat((slots.state[frame.slots[:decode]], tensors.states[tensors.state_rows(frame)]))
    if spec.coda_layers:
        is_done = torch.cat((slots.left[frame.slots[:decode]], frame.depths[decode:] == slots.loops - 1))
        frame = frame.only(is_done)
    return states, run_coda(states, frame)


class PlainLineUp:
    """Meets `LineUp` for every model and rule."""

    def __init__(self, spec: ModelSpec, tensors: TickTensors, run_coda: RunCoda) -> None:
        self._spec = spec
        self._tensors = tensors
        self._run_coda = run_coda

    def candidates(self, frame: Frame, *, has_ends: bool) -> Candidates:
        slots, decode = self._tensors.slots, frame.decode_rows
        slot = frame.slots[:decode]
        is_due, loops, position = slots.left[slot], slots.ran[slot], frame.positions[:decode]
        if has_ends:
            _, end_slot, _, end_position = self._tensors.inputs.ends
            is_due = torch.cat((is_due, end_slot != slots.sink))
            slot = torch.cat((slot, end_slot))
            position = torch.cat((position, end_position))
            loops = torch.cat((loops, torch.full_like(end_slot, slots.loops)))
        number = torch.argsort(~is_due, stable=True)
        to = torch.where(is_due[number], slot[number], slots.sink)
        columns = torch.stack((number, to, position[number], loops[number]))
        states, x = self._head_inputs(frame, has_ends=has_ends)
        return Candidates(columns, states[number], x[number], is_due.sum(dtype=torch.int32).view(1))

    def _head_inputs(self, frame: Frame, *, has_ends: bool) -> tuple[Tensor, Tensor]:
        """[M, W] and [M, H] of the candidates by number."""
        tensors, slot = self._tensors, frame.slots[: frame.decode_rows]
        if self._spec.coda_layers:
            states, x = head_inputs(self._spec, tensors, frame, self._run_coda)
            row = torch.arange(len(slot), device=slot.device)
            if has_ends:
                row = torch.cat((row, tensors.inputs.ends[0] + len(slot)))
            return states[row], x[row]
        states = tensors.slots.state[slot]
        if has_ends:
            states = torch.cat((states, tensors.states[tensors.inputs.ends[2]]))
        return states, self._run_coda(states, frame)

    def feed_back(self, found: Candidates, tokens: Tensor, is_finite: Tensor) -> None:
        slots = self._tensors.slots
        number, to, positions, loops = found.columns.unbind(0)
        is_due = torch.arange(len(to), device=to.device) < found.count
        is_stop = (tokens.unsqueeze(1) == slots.sampling.stop_ids[to]).any(dim=1)
        outputs = slots.outputs[to] + 1
        slots.token[to] = tokens
        slots.position[to] = positions + 1
        slots.outputs[to] = outputs
        slots.is_decoding[to] = is_due & is_finite.to(torch.bool) & ~is_stop & (outputs < slots.max_tokens[to])
        if slots.previous_final is not None:
            slots.previous_final[to] = found.states[:, : self._spec.hidden_size]
        self._tensors.results.write_samples(found.count, [number, tokens, loops, is_finite, is_stop])


class ReadOut:
    def __init__(self, model: LoopedModel, slots: SlotTable, line_up: LineUp, greedy: Greedy, sampler: Sample) -> None:
        self._model = model
        self._slots = slots
        self._line_up = line_up
        self._greedy = greedy
        self._sample = sampler

    def greedy(self, frame: Frame, *, has_ends: bool) -> None:
        """The likeliest token of every row that is due one."""
        self.take_greedy(self._line_up.candidates(frame, has_ends=has_ends))

    def take_greedy(self, found: Candidates) -> None:
        tokens, is_finite = self._greedy(self._model.head(found.x, found.count), found.count)
        self._line_up.feed_back(found, tokens, is_finite)

    def sampled(self, frame: Frame, steps: SamplerSteps, *, has_ends: bool) -> Reports:
        """A token of every row that is due one, by `steps`."""
        return self.take_sampled(self._line_up.candidates(frame, has_ends=has_ends), steps)

    def take_sampled(self, found: Candidates, steps: SamplerSteps) -> Reports:
        sampled = self._sample(self._model.head(found.x, found.count), found, self._slots, steps)
        self._line_up.feed_back(found, sampled.tokens, sampled.is_finite)
        return Reports(sampled.logprob, sampled.top_ids, sampled.top_logprobs)


def candidate_count(decode_rows: int, has_ends: bool) -> int:
    """How many there are for a tick's shape."""
    return decode_rows + (MOST_CHUNKS if has_ends else 0)
