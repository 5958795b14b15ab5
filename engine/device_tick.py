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

from epicycle.engine.errors import TickError
from epicycle.engine.frame import Frame
from epicycle.engine.graph_runner import Part, RunCounters, Runner
from epicycle.engine.logprobs import clean_rows, raw_logprobs, widen
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.read_out import Candidates, ReadOut, candidate_count, head_inputs
from epicycle.engine.route import Chunk, Resident, TickWork
from epicycle.engine.sampling import SamplerSteps, steps_for
from epicycle.engine.settle import TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick import SCORED_ROWS_AT_ONCE, PromptScores
from epicycle.engine.tick_backend import TickBackend
from epicycle.engine.tick_inputs import MOST_CHUNKS, Ladder, TickInputs, TickShape, samples_at_end
from epicycle.engine.tickets import DeviceTicket, Reports, ResultColumns, ScoreParts, record
from epicycle.engine.upload import upload


@dataclass(frozen=True, slots=True)
class _Due:
    """What the host knows of a tick's end."""

    has_ends: bool  # a prompt's first token is sampled
    reads_out: bool  # a row may leave, or a prompt chunk ends
    steps: SamplerSteps | None  # None: every row takes the likeliest token and wants no report


class DeviceTick:
    """Meets `tick.Tick` over tensors made once; `new_epoch` empties the slots."""

    most_chunks = MOST_CHUNKS
    takes_whole_tokens = True

    def __init__(self, model: LoopedModel, tensors: TickTensors, backend: TickBackend, runner: Runner) -> None:
        self._model = model
        self._tensors = tensors
        self._slots = tensors.slots
        self._inputs = tensors.inputs
        self._backend = backend
        self._runner = runner
        self._read_out = ReadOut(model, tensors.slots, backend.line_up, backend.greedy, backend.sample)
        self._reports: dict[Part, Reports] = {}
        self.most_prompt_rows = tensors.inputs.ladder.prompt[-1]

    @property
    def counters(self) -> RunCounters:
        return self._runner.counters

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        return self._inputs.ladder.prompt_room(decode_rows, rows)

    def new_epoch(self) -> None:
        """Nobody is resident, also where an earlier pump was left in the middle of prompts."""
        self._slots.is_decoding.zero_()
        self._inputs.empty()

    def drop(self, slot: int) -> None:
        """The slot's request has gone: ticks launched from now on don't run it."""
        self._slots.is_decoding[slot].fill_(False)
        self._inputs.drop(slot)

    @torch.inference_mode()
    def launch(self, work: TickWork) -> DeviceTicket:
        """Launch one loop for every row of `work`, or whole tokens, and whatever follows. Raises TickError."""
        try:
            return self._launch(work)
        except RuntimeError as error:  # torch's, for everything that a device refuses
            raise TickError("device_failed", f"a tick can't be launched: {error}") from error

    def _launch(self, work: TickWork) -> DeviceTicket:
        due = self._due(work)
        shape = self._inputs.place(work, self._slots.loops)
        if work.loops > 1:
            self._run_token(shape)
        else:
            self._run_loop(shape, has_prelude=self._has_prelude(work))
        scores = self._read_prompts(work, shape)
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
        steps = self._steps([*work.decode, *(chunk.resident for chunk in work.chunks)])
        return _Due(has_ends, may_leave or ends or has_coda, steps)

    def _steps(self, rows: list[Resident]) -> SamplerSteps | None:
        steps = steps_for(row.params for row in rows)
        wants_report = any(row.join.sampling.logprobs >= 0 for row in rows)
        edits = steps.penalise or steps.bias or steps.hold_stops or steps.draw
        return steps if edits or wants_report else None

    def _has_prelude(self, work: TickWork) -> bool:
        """A row may be at the start of its token. A prelude without layers is always run: it costs next to nothing."""
        starts = any(not row.is_fixed_depth or row.planned_loops == 0 for row in work.decode)
        return not self._model.spec.first_recurrent or starts or any(chunk.depth == 0 for chunk in work.chunks)

    @torch.inference_mode()
    def rehearse(self, part: Part) -> None:
        """Run a part with nobody in it."""
        self._inputs.place_padding(part.shape)
        match part.name:
            case "token":
                self._run_token(part.shape)
            case "loop":
                self._run_loop(part.shape, has_prelude=part.flag)
            case "greedy":
                self._run_greedy(part.shape, has_ends=part.flag)
            case "sampled":
                self._run_sampled(part.shape, SamplerSteps(), has_ends=part.flag)
            case _:
                raise AssertionError(part)

    # Parts, each of a fixed shape

    def _run_token(self, shape: TickShape) -> None:
        self._runner.run(Part("token", shape), lambda: self._token(shape))

    def _run_loop(self, shape: TickShape, *, has_prelude: bool) -> None:
        self._runner.run(Part("loop", shape, has_prelude), lambda: self._loop(shape, has_prelude=has_prelude))

    def _frame(self, shape: TickShape) -> Frame:
        return self._backend.route(self._slots, self._inputs, shape)

    def _enter(self, frame: Frame, *, has_prelude: bool) -> Tensor:
        """[N, W] states as the rows enter their next loop."""
        slots, slot = self._slots, frame.slots[: frame.decode_rows]
        held = slots.state[slot]
        if frame.prompt_rows:
            held = torch.cat((held, self._tensors.states[self._tensors.state_rows(frame)]))
        if not has_prelude:
            return held
        tokens = slots.token[slot]
        if frame.prompt_rows:
            tokens = torch.cat((tokens, self._prompt_tokens(frame)))
        return self._backend.enter(tokens, frame, held)

    def _prompt_tokens(self, frame: Frame) -> Tensor:
        prompt, decode = self._slots.prompt, frame.decode_rows
        return prompt[frame.slots[decode:], frame.positions[decode:].clamp(max=prompt.shape[1] - 1)]

    def _loop(self, shape: TickShape, *, has_prelude: bool) -> None:
        """One loop of every row, and what it settles."""
        frame = self._frame(shape)
        before = self._enter(frame, has_prelude=has_prelude)
        after, gate = self._backend.run_loop(before, frame)
        self._backend.settle.loop(frame, before, after, gate)

    def _token(self, shape: TickShape) -> None:
        """Every loop of a token, for decode rows that all start one and take all their loops: nothing to decide."""
        frame = self._frame(shape)
        state = self._backend.enter(self._slots.token[frame.slots], frame, None)
        for depth in range(self._slots.loops):
            at = frame.deeper(depth) if depth else frame
            state, _ = self._backend.run_loop(state, at, wants_gate=False)
        self._backend.settle.token(frame, state)

    def _end(self, shape: TickShape, due: _Due) -> Reports | None:
        """Coda, head and sampling of the rows that are due."""
        shape = self._read_shape(shape)
        if due.steps is not None:
            return self._run_sampled(shape, due.steps, has_ends=due.has_ends)
        self._run_greedy(shape, has_ends=due.has_ends)
        return None

    def _run_sampled(self, shape: TickShape, steps: SamplerSteps, *, has_ends: bool) -> Reports:
        """Reports of a graph lie where its capture put them; they are copied before another part runs. A graph serves
        all `steps`, since only a sampler that does is captured."""
        part = Part("sampled", shape, has_ends)

        def launch() -> None:
            self._reports[part] = self._read_out.sampled(self._frame(shape), steps, has_ends=has_ends)

        self._runner.run(part, launch)
        return self._reports[part].first(steps.alternatives)

    def _run_greedy(self, shape: TickShape, *, has_ends: bool) -> None:
        part = Part("greedy", shape, has_ends)
        self._runner.run(part, lambda: self._read_out.greedy(self._frame(shape), has_ends=has_ends))

    def _read_shape(self, shape: TickShape) -> TickShape:
        """Without coda layers only ends of prompts matter, and they have a table of their own."""
        return shape if self._model.spec.coda_layers else TickShape(shape.decode_rows, 0)

    # Prompt scores and kept heads, which are rare: outside graphs, and before tokens move their slots on

    def _read_prompts(self, work: TickWork, shape: TickShape) -> list[ScoreParts]:
        """Keep the heads of prompts that end, and score those whose logprobs are wanted."""
        done = [
            (chunk, start)
            for chunk, start in _starts(work.chunks, shape.decode_rows)
            if chunk.depth + 1 == self._slots.loops
        ]
        kept = [(chunk, start + chunk.count - 1) for chunk, start in done if chunk.keeps_head]
        scored = [(chunk, start) for chunk, start in done if chunk.resident.join.sampling.prompt_logprobs >= 0]
        if not kept and not scored:
            return []
        states, x = head_inputs(self._model.spec, self._tensors, self._frame(shape), self._backend.run_coda)
        for chunk, row in kept:
            self._slots.heads.store(chunk.resident.head_to, states[row], x[row])
        return [self._score_chunk(chunk, x[start : start + chunk.count]) for chunk, start in scored]

    @torch.inference_mode()
    def launch_heads(self, residents: list[Resident]) -> DeviceTicket:
        """As `launch`, outside graphs. At most MOST_CHUNKS residents."""
        try:
            return self._launch_heads(residents)
        except RuntimeError as error:
            raise TickError("device_failed", f"a tick can't be launched: {error}") from error

    def _launch_heads(self, residents: list[Resident]) -> DeviceTicket:
        slots, count = self._slots, len(residents)
        numbers = [
            range(count),
            [resident.slot for resident in residents],
            [resident.prompt_tokens - 1 for resident in residents],
            [slots.loops] * count,
            [resident.head_from for resident in residents],
            [count],
        ]
        sent = upload([number for column in numbers for number in column], torch.int64, slots.device)
        states, x = slots.heads.load(sent[4 * count : 5 * count])
        found = Candidates(sent[: 4 * count].view(4, count), states, x, sent[-1:].to(torch.int32))
        steps = self._steps(residents)
        reports = None
        if steps is None:
            self._read_out.take_greedy(found)
        else:
            reports = self._read_out.take_sampled(found, steps).first(steps.alternatives)
        flags, samples = self._tensors.results.to_host(0, count)
        return self._ticket_of(0, list(residents), flags, samples, reports, [])

    def _score_chunk(self, chunk: Chunk, x: Tensor) -> ScoreParts:
        """Row p of a chunk scores prompt token p + 1; the prompt's last row scores nothing."""
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
        candidates = candidate_count(shape.decode_rows, due.has_ends) if due.reads_out else 0
        flags, samples = self._tensors.results.to_host(shape.decode_rows, candidates)
        return self._ticket_of(len(work.decode), [*work.decode, *padding, *ends], flags, samples, reports, scores)

    def _ticket_of(
        self,
        decode_rows: int,
        candidates: list[Resident | None],
        flags: Tensor,
        samples: Tensor | None,
        reports: Reports | None,
        scores: list[ScoreParts],
    ) -> DeviceTicket:
        copies = reports.copied() if reports is not None else None
        return DeviceTicket(decode_rows, candidates, flags, samples, copies, scores, record(self._slots.device))


def make_tensors(slots: SlotTable, ladder: Ladder) -> TickTensors:
    """What ticks over `slots` need besides, for shapes up to the ladder's last rungs."""
    inputs = TickInputs(ladder, slots.sink, slots.device)
    states = slots.state.new_zeros(inputs.state_rows + 1, slots.state.shape[1])
    most = ladder.decode[-1]
    return TickTensors(slots, inputs, states, ResultColumns(most, candidate_count(most, has_ends=True), slots.device))


def _starts(chunks: list[Chunk], first: int) -> list[tuple[Chunk, int]]:
    """Chunks with the tick row at which each begins."""
    found = []
    for chunk in chunks:
        found.append((chunk, first))
        first += chunk.count
    return found
