"""A tick that the device decides: which rows run, which leave, which are sampled and which end.

Owns the order of its steps and nothing that a step computes. The host says which rows might run (`TickInputs`) and
reads later what became of them (`DeviceTicket`); in between it never waits, so ticks can be launched ahead. Every step
has a shape that follows from the tick's rung alone, so that `GraphRunner` can replay it. On a CPU, or on a GPU without
kernels, the same steps run by plain torch. It must not know leases, streams or messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitDecision, ExitRows, ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.frame import Frame
from epicycle.engine.graph_runner import Part, RunCounters, Runner
from epicycle.engine.logprobs import clean_rows, raw_logprobs, widen
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.read_out import ReadOut, candidates
from epicycle.engine.route import Chunk, Resident, TickWork
from epicycle.engine.sampling import SamplerSteps, steps_for
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick import SCORED_ROWS_AT_ONCE, PromptScores
from epicycle.engine.tick_backend import TickBackend
from epicycle.engine.tick_inputs import MOST_CHUNKS, Ladder, TickInputs, TickShape, samples_at_end
from epicycle.engine.tickets import DeviceTicket, Reports, ResultColumns, ScoreParts, record


@dataclass(frozen=True, slots=True)
class _Due:
    """What the host knows of a tick's end."""

    has_ends: bool  # a prompt's first token is sampled
    reads_out: bool  # a row may leave, or a prompt chunk ends
    steps: SamplerSteps | None  # None: every row takes the likeliest token and wants no report


class DeviceTick:
    """Meets `tick.Tick` over tensors made once; `new_epoch` empties the slots."""

    most_chunks = MOST_CHUNKS

    def __init__(
        self,
        model: LoopedModel,
        slots: SlotTable,
        rule: ExitRule,
        needs: RuleEntry,
        backend: TickBackend,
        ladder: Ladder,
        runner: Runner,
    ) -> None:
        self._model = model
        self._slots = slots
        self._rule = rule
        self._needs = needs
        self._backend = backend
        self._runner = runner
        self._inputs = TickInputs(ladder, slots.sink, slots.device)
        self._states = slots.state.new_zeros(self._inputs.state_rows + 1, slots.state.shape[1])
        self._results = ResultColumns(ladder.decode[-1], ladder.decode[-1] + MOST_CHUNKS, slots.device)
        self._read_out = ReadOut(model, slots, self._inputs, self._states, self._results, backend.greedy)
        self.takes_whole_tokens = True
        self.idle_chunk_tokens = ladder.prompt[-1]

    @property
    def counters(self) -> RunCounters:
        return self._runner.counters

    def new_epoch(self) -> None:
        """Nobody is resident."""
        self._slots.is_decoding.zero_()

    def drop(self, slot: int) -> None:
        """The slot's request has gone: ticks launched from now on don't run it."""
        self._slots.is_decoding[slot] = False
        self._inputs.drop(slot)

    @torch.inference_mode()
    def launch(self, work: TickWork) -> DeviceTicket:
        """Launch one loop for every row of `work`, or whole tokens, and whatever follows."""
        due = self._due(work)
        shape = self._inputs.place(work, self._slots.loops)
        if work.loops > 1:
            self._runner.run(Part("token", shape), lambda: self._token(shape))
        else:
            has_prelude = self._has_prelude(work)
            self._runner.run(Part("loop", shape, has_prelude), lambda: self._loop(shape, has_prelude))
        scores = self._score(work, shape)
        reports = self._end(shape, due) if due.reads_out else None
        self._runner.count(work, shape)
        return self._ticket(work, shape, due, reports, scores)

    # What the host knows beforehand

    def _due(self, work: TickWork) -> _Due:
        loops = self._slots.loops
        has_ends = not work.decode or any(samples_at_end(chunk, loops) for chunk in work.chunks)
        may_leave = work.loops > 1 or any(row.may_leave for row in work.decode)
        has_coda = bool(self._model.spec.coda_layers) and any(chunk.depth + 1 == loops for chunk in work.chunks)
        ends = has_ends and any(chunk.depth + 1 == loops for chunk in work.chunks)
        return _Due(has_ends, may_leave or ends or has_coda, self._steps(work))

    def _steps(self, work: TickWork) -> SamplerSteps | None:
        rows = [*work.decode, *(chunk.resident for chunk in work.chunks)]
        steps = steps_for(row.params for row in rows)
        wants_report = any(row.join.sampling.logprobs >= 0 for row in rows)
        edits = steps.penalise or steps.bias or steps.hold_stops or steps.draw
        return steps if edits or wants_report else None

    def _has_prelude(self, work: TickWork) -> bool:
        """A row may be at the start of its token. A prelude without layers is always run: it costs next to nothing."""
        starts = any(not row.is_fixed_depth or row.planned_loops == 0 for row in work.decode)
        return not self._model.spec.first_recurrent or starts or any(chunk.depth == 0 for chunk in work.chunks)

    # Parts, each of a fixed shape

    def _frame(self, shape: TickShape) -> Frame:
        return self._backend.route(self._slots, self._inputs, shape)

    def _enter(self, frame: Frame, has_prelude: bool) -> Tensor:
        """[N, W] states as the rows enter their next loop."""
        decode = frame.decode_rows
        slots, inputs = self._slots, self._inputs
        held = torch.cat((slots.state[frame.slots[:decode]], self._states[inputs.prompt_columns(frame.prompt_rows)[4]]))
        if not has_prelude:
            return held
        is_fresh = frame.depths == 0
        last = slots.prompt.shape[1] - 1
        prompt = slots.prompt[frame.slots[decode:], frame.positions[decode:].clamp(max=last)]
        tokens = torch.cat((slots.token[frame.slots[:decode]], prompt))
        rows = self._backend.attention.rows(frame.only(is_fresh) if self._model.spec.first_recurrent else frame)
        return torch.where(is_fresh.unsqueeze(1), self._model.prelude(tokens, rows), held)

    def _loop(self, shape: TickShape, has_prelude: bool) -> None:
        """One loop of every row, the exit test, the KV of those that leave, and their states."""
        frame = self._frame(shape)
        before = self._enter(frame, has_prelude)
        after, gate = self._backend.loop(self._model, before, frame)
        decode = shape.decode_rows
        if decode:
            decision = self._decide(frame, before, after, gate)
            self._store_rows(frame, decision, after)
        if shape.prompt_rows:
            self._states[self._inputs.prompt_columns(shape.prompt_rows)[4]] = after[decode:]

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

    def _store_rows(self, frame: Frame, decision: ExitDecision, after: Tensor) -> None:
        """Exit state and latent state of the decode rows that ran; inert rows are marked and keep theirs."""
        decode, slots = frame.decode_rows, self._slots
        slot, live, done = frame.slots[:decode], frame.live[:decode], frame.depths[:decode] + 1
        leave = decision.leave & live
        to = torch.where(live, slot, slots.sink)
        slots.survival[to] = decision.survival
        slots.pending[to] = decision.pending
        slots.loops_done[to] = torch.where(decision.leave, 0, done)
        slots.state[to] = after[:decode]
        self._mark(slot, torch.where(live, done, 0), leave)
        self._backend.commit(slots, frame, leave, done)

    def _mark(self, slot: Tensor, ran: Tensor, left: Tensor) -> None:
        self._slots.ran[slot] = ran
        self._slots.left[slot] = left
        self._results.write_rows(ran, left)

    def _token(self, shape: TickShape) -> None:
        """Every loop of a token, for decode rows that all start one and take all their loops: nothing to decide."""
        frame, slots, loops = self._frame(shape), self._slots, self._slots.loops
        state = self._enter(frame, has_prelude=True)
        for depth in range(loops):
            state, _ = self._backend.loop(self._model, state, frame.deeper(depth) if depth else frame)
        live = frame.live
        slots.state[torch.where(live, frame.slots, slots.sink)] = state
        self._mark(frame.slots, live * loops, live)

    def _end(self, shape: TickShape, due: _Due) -> Reports | None:
        """Coda, head and sampling of the rows that are due; by the plain sampler, outside graphs, where more than the
        likeliest token is asked for."""
        if due.steps is None:
            self._runner.run(Part("greedy", shape, due.has_ends), lambda: self._greedy_end(shape, due.has_ends))
            return None
        frame = self._frame(shape)
        states, x = self._read_out.head_inputs(frame, self._backend.attention)
        return self._read_out.sampled(frame, states, x, due.steps, has_ends=due.has_ends)

    def _greedy_end(self, shape: TickShape, has_ends: bool) -> None:
        frame = self._frame(shape)
        states, x = self._read_out.head_inputs(frame, self._backend.attention)
        self._read_out.greedy(frame, states, x, has_ends=has_ends)

    # Prompt scores, which are rare: outside graphs, and before tokens move their slots on

    def _score(self, work: TickWork, shape: TickShape) -> list[ScoreParts]:
        """Row p of a chunk scores prompt token p + 1; the prompt's last row scores nothing."""
        wanted = [
            (chunk, start)
            for chunk, start in _starts(work.chunks, shape.decode_rows)
            if chunk.depth + 1 == self._slots.loops and chunk.resident.join.sampling.prompt_logprobs >= 0
        ]
        if not wanted:
            return []
        _, x = self._read_out.head_inputs(self._frame(shape), self._backend.attention)
        return [self._score_chunk(chunk, x[start : start + chunk.count]) for chunk, start in wanted]

    def _score_chunk(self, chunk: Chunk, x: Tensor) -> ScoreParts:
        resident, k = chunk.resident, chunk.resident.join.sampling.prompt_logprobs
        targets = self._slots.prompt[resident.slot, chunk.first + 1 : chunk.end + (not chunk.ends_prompt)]
        found = ScoreParts(PromptScores(resident, chunk.first + 1, k))
        for first in range(0, len(targets), SCORED_ROWS_AT_ONCE):
            target = targets[first : first + SCORED_ROWS_AT_ONCE]
            clean, is_whole = clean_rows(self._model.head(x[first : first + len(target)]))
            report = raw_logprobs(widen(clean), target, torch.full_like(target, k), k)
            found.add(report.logprob, report.top_ids, report.top_logprobs, is_whole)
        return found

    def _ticket(
        self, work: TickWork, shape: TickShape, due: _Due, reports: Reports | None, scores: list[ScoreParts]
    ) -> DeviceTicket:
        padding: list[Resident | None] = [None] * (shape.decode_rows - len(work.decode))
        ends = [chunk.resident if samples_at_end(chunk, self._slots.loops) else None for chunk in work.chunks]
        flags, samples = self._results.to_host(
            shape.decode_rows, candidates(shape.decode_rows, due.has_ends) if due.reads_out else 0
        )
        return DeviceTicket(
            decode_rows=len(work.decode),
            candidates=[*work.decode, *padding, *ends],
            flags=flags,
            samples=samples,
            reports=reports.copied() if reports is not None else None,
            scores=scores,
            event=record(self._slots.device),
        )


def _starts(chunks: list[Chunk], first: int) -> list[tuple[Chunk, int]]:
    """Chunks with the tick row at which each begins."""
    found = []
    for chunk in chunks:
        found.append((chunk, first))
        first += chunk.count
    return found
