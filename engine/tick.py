"""One tick, eagerly: prelude, one loop of the core, exit test, commit, coda, head, sampling and feedback.

Owns the order of these steps and the states of prompt rows between ticks. Everything a step needs is resident in
`SlotTable` and `KvPool`; the host says only which rows run (`TickWork`) and learns what came of it (`TickResult`). This
is the plain twin: it reads the exit flags back before it runs the coda, where a faster tick would decide on the device.
It must not know leases, streams or messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitRows, ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.logprobs import clean_rows, raw_logprobs, widen
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.pool import KvPool
from epicycle.engine.route import Chunk, Resident, TickWork
from epicycle.engine.rows import RowLayout, TickRows
from epicycle.engine.sampler import sample, stops
from epicycle.engine.sampling import steps_for
from epicycle.engine.slots import SlotTable

ANY_NUMBER = 1 << 30
SCORED_ROWS_AT_ONCE = 64  # vocabulary-wide rows are big


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens of one tick, one entry a resident; `top_*` hold as many alternatives as the widest row asked for."""

    residents: list[Resident]
    tokens: list[int]
    depths: list[int]
    is_finite: list[bool]
    is_stop: list[bool]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(slots=True)
class PromptScores:
    """Logprobs of prompt tokens `first` .. of one chunk's request, with `k` alternatives each, tokens concatenated."""

    resident: Resident
    first: int
    k: int
    is_finite: bool = True
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TickResult:
    """What a tick did. For each decode row of its work: the loops its token has had (0: the row didn't run), and
    whether the last of them was in this tick."""

    ran: list[int]
    leaves: list[bool]
    samples: Samples | None = None
    scores: list[PromptScores] = field(default_factory=list)


class Ticket(Protocol):
    """A tick that has been launched."""

    def is_complete(self) -> bool:
        """The device has done all of it; never waits."""
        ...

    def result(self) -> TickResult:
        """What came of it; only once it is complete."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The ticket of a tick that was complete when it returned."""

    outcome: TickResult

    def is_complete(self) -> bool:
        return True

    def result(self) -> TickResult:
        return self.outcome


class Tick(Protocol):
    """Runs ticks over the slots' tensors. Ticks run in the order of their launches."""

    most_chunks: int  # that one tick takes
    takes_whole_tokens: bool  # `TickWork.loops` may be more than 1
    most_prompt_rows: int  # that one tick takes, and should take where few rows decode; or ANY_NUMBER

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        """How many prompt rows fill a tick of some `rows` rows beside so many decode rows."""
        ...

    def launch(self, work: TickWork) -> Ticket: ...

    def launch_heads(self, residents: list[Resident]) -> Ticket:
        """Sample the first token of requests whose whole prompt is in their pages, from the head rows they name."""
        ...

    def drop(self, slot: int) -> None:
        """The slot's request has gone: ticks launched from now on don't run it."""
        ...


class EagerTick:
    """Runs ticks on the device of its tensors; `row_tile` is the multiple of rows that the model's operations like."""

    most_chunks = ANY_NUMBER
    takes_whole_tokens = False
    most_prompt_rows = ANY_NUMBER

    def __init__(
        self, model: LoopedModel, pool: KvPool, slots: SlotTable, rule: ExitRule, needs: RuleEntry, row_tile: int
    ) -> None:
        self._model = model
        self._spec = model.spec
        self._pool = pool
        self._slots = slots
        self._rule = rule
        self._needs = needs
        self._row_tile = row_tile
        self._prompt_states: dict[int, Tensor] = {}  # slot -> [rows of its chunk, state_width]

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        return rows

    def drop(self, slot: int) -> None:
        """Forget what a slot's chunk in flight has computed."""
        self._prompt_states.pop(slot, None)

    @torch.inference_mode()
    def launch(self, work: TickWork) -> Done:
        """Run one loop for every row of `work`, and whatever follows for those that are done."""
        layout = self._layout(work)
        before = self._states(work, layout)
        after, gate = self._model.loop(before, self._rows(layout))
        leaves = self._exit(work, layout, before, after, gate) if work.decode else []
        finished = self._keep_prompts(work, after)
        samples, scores = self._read_out(work, layout, after, leaves, finished)
        return Done(TickResult([row.loops_done + 1 for row in work.decode], leaves, samples, scores))

    @torch.inference_mode()
    def launch_heads(self, residents: list[Resident]) -> Done:
        positions = self._index([resident.prompt_tokens - 1 for resident in residents])
        states, x = self._slots.heads.load(self._index([resident.head_from for resident in residents]))
        loops = torch.full_like(positions, self._spec.loops)
        return Done(TickResult([], [], self._sample(residents, positions, loops, states, x)))

    def _rows(self, layout: RowLayout) -> TickRows:
        return TickRows(self._pool, self._slots.page_table, layout)

    def _layout(self, work: TickWork) -> RowLayout:
        """Decode rows from the slots' own columns, then the chunks' rows, padded with copies of the first row."""
        slots = self._slots
        decode = self._index([row.slot for row in work.decode])
        positions = slots.position[decode]
        columns = [torch.stack((decode, positions, slots.loops_done[decode], positions + 1))]
        for chunk in work.chunks:
            column = torch.empty(4, chunk.count, dtype=torch.int64, device=slots.device)
            column[0], column[2], column[3] = chunk.resident.slot, chunk.depth, chunk.end
            torch.arange(chunk.first, chunk.end, out=column[1])
            columns.append(column)
        rows = torch.cat(columns, dim=1)
        short = -rows.shape[1] % self._row_tile
        rows = torch.cat((rows, rows[:, :1].expand(4, short)), dim=1)
        return RowLayout(
            slots=rows[0],
            positions=rows[1],
            depths=rows[2],
            noise_seeds=slots.noise_seed[rows[0]],
            ends=rows[3],
            decode_rows=len(work.decode),
            prompt_rows=work.prompt_rows,
        )

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._slots.device)

    def _states(self, work: TickWork, layout: RowLayout) -> Tensor:
        """[N, state_width] as the rows enter this loop; those at depth 0 come from the prelude."""
        decode = layout.decode_rows
        parts = [self._slots.state[layout.slots[:decode]]]
        fresh_decode = [index for index, row in enumerate(work.decode) if row.loops_done == 0]
        fresh_prompt: list[int] = []
        start = decode
        for chunk in work.chunks:
            if chunk.depth:
                parts.append(self._prompt_states[chunk.resident.slot])
            else:
                parts.append(self._slots.state.new_zeros(chunk.count, self._spec.state_width))
                fresh_prompt.extend(range(start, start + chunk.count))
            start += chunk.count
        parts.append(self._slots.state.new_zeros(len(layout.slots) - start, self._spec.state_width))
        states = torch.cat(parts)
        if fresh_decode or fresh_prompt:
            index = self._index(fresh_decode + fresh_prompt)
            states[index] = self._prelude(layout, fresh_decode, fresh_prompt)
        return states

    def _prelude(self, layout: RowLayout, decode: list[int], prompt: list[int]) -> Tensor:
        rows = layout.pick(self._index(decode), self._index(prompt), self._row_tile)
        tokens = self._slots.prompt[rows.slots, rows.positions.clamp(max=self._slots.prompt.shape[1] - 1)]
        tokens[: len(decode)] = self._slots.token[rows.slots[: len(decode)]]
        return self._model.prelude(tokens, self._rows(rows))[: rows.live_rows]

    def _exit(
        self, work: TickWork, layout: RowLayout, before: Tensor, after: Tensor, gate: Tensor | None
    ) -> list[bool]:
        """Test every decode row in the loop it has just run, store its state, and commit the KV of those that leave."""
        count, slots, needs = layout.decode_rows, self._slots, self._needs
        slot, done = layout.slots[:count], layout.depths[:count] + 1
        decision = self._rule.decide(
            ExitRows(
                loops_done=done,
                survival=slots.survival[slot],
                pending=slots.pending[slot],
                threshold=slots.threshold[slot],
                min_loops=slots.min_loops[slot],
                max_loops=slots.max_loops[slot],
                state_after=after[:count],
                state_before=before[:count] if needs.needs_state_before else None,
                gate=gate[:count] if gate is not None else None,
                previous_final=slots.previous_final[slot] if slots.previous_final is not None else None,
                traced_depth=self._traced(slot),
            )
        )
        slots.survival[slot] = decision.survival
        slots.pending[slot] = decision.pending
        slots.loops_done[slot] = torch.where(decision.leave, 0, done)
        slots.state[slot] = after[:count]
        leaves: list[bool] = decision.leave.tolist()
        if any(leaves):
            self._commit(layout, decision.leave.nonzero().squeeze(1), done)
        return leaves

    def _traced(self, slot: Tensor) -> Tensor | None:
        trace = self._slots.trace
        return trace[slot, self._slots.outputs[slot]] if trace is not None else None

    def _commit(self, layout: RowLayout, leavers: Tensor, done: Tensor) -> None:
        slot, position = layout.slots[leavers], layout.positions[leavers]
        pages = self._slots.pages_at(slot, position, self._pool.page_tokens)
        offsets = position % self._pool.page_tokens
        self._pool.fill_deeper(pages, offsets, done[leavers], self._slots.max_loops[slot])

    def _keep_prompts(self, work: TickWork, after: Tensor) -> list[tuple[Chunk, int]]:
        """Keep the states of chunks that go on; returns those that have run every loop, with their first row."""
        finished, start = [], len(work.decode)
        for chunk in work.chunks:
            if chunk.depth + 1 < self._spec.loops:
                self._prompt_states[chunk.resident.slot] = after[start : start + chunk.count]
            else:
                self._prompt_states.pop(chunk.resident.slot, None)
                finished.append((chunk, start))
            start += chunk.count
        return finished

    def _read_out(
        self,
        work: TickWork,
        layout: RowLayout,
        after: Tensor,
        leaves: list[bool],
        finished: list[tuple[Chunk, int]],
    ) -> tuple[Samples | None, list[PromptScores]]:
        """Coda for the rows that are done with their loops, then the head for those whose logits somebody wants."""
        leavers = [index for index, leaves_now in enumerate(leaves) if leaves_now]
        prompt_rows, wanted, scored, kept = self._prompt_read_outs(finished, len(leavers))
        if not leavers and not prompt_rows:
            return None, []
        rows = layout.pick(self._index(leavers), self._index(prompt_rows), self._row_tile)
        states = after[self._index(leavers + prompt_rows + [0] * (len(rows.slots) - rows.live_rows))]
        x = self._model.coda(states, self._rows(rows))
        residents = [work.decode[index] for index in leavers] + [chunk.resident for chunk, _ in wanted]
        for chunk, row in kept:
            self._slots.heads.store(chunk.resident.head_to, states[row], x[row])
        samples = None
        if residents:
            picked = self._index([*range(len(leavers)), *(row for _, row in wanted)])
            done = torch.where(picked < len(leavers), rows.depths[picked] + 1, self._spec.loops)
            samples = self._sample(residents, rows.positions[picked], done, states[picked], x[picked])
        return samples, [self._score(chunk, x[row : row + chunk.count]) for chunk, row in scored]

    def _prompt_read_outs(
        self, finished: list[tuple[Chunk, int]], start: int
    ) -> tuple[list[int], list[tuple[Chunk, int]], list[tuple[Chunk, int]], list[tuple[Chunk, int]]]:
        """(rows that need the coda, chunks that sample with their last row, chunks that are scored with their first,
        chunks whose last row is kept).

        The first are rows of this tick; the others count the coda's rows, prompts' beginning at `start`.
        """
        rows: list[int] = []
        sampled, scored, kept = [], [], []
        for chunk, first in finished:
            samples = chunk.ends_prompt and chunk.resident.samples
            scores = chunk.resident.join.sampling.prompt_logprobs >= 0
            if scores or self._spec.coda_layers:  # coda layers hold KV of every prompt token
                rows.extend(range(first, first + chunk.count))
            elif samples or chunk.keeps_head:
                rows.append(first + chunk.count - 1)
            if samples:
                sampled.append((chunk, start + len(rows) - 1))
            if scores:
                scored.append((chunk, start + len(rows) - chunk.count))
            if chunk.keeps_head:
                kept.append((chunk, start + len(rows) - 1))
        return rows, sampled, scored, kept

    def _sample(
        self, residents: list[Resident], positions: Tensor, depths: Tensor, states: Tensor, x: Tensor
    ) -> Samples:
        """One token for each resident, from its head input; the token, its position and depth 0 go back to the slot."""
        slots = self._slots
        slot = self._index([resident.slot for resident in residents])
        steps = steps_for(resident.params for resident in residents)
        rows = slots.sampling.gather(slot, positions + 1, slots.outputs[slot], steps)
        sampled = sample(self._model.head(x), rows, steps)
        if steps.penalise:
            slots.sampling.count(slot, sampled.tokens, sampled.is_finite)
        slots.token[slot] = sampled.tokens
        slots.position[slot] = positions + 1
        slots.outputs[slot] += 1
        if slots.previous_final is not None:
            slots.previous_final[slot] = states[:, : self._spec.hidden_size]
        return Samples(
            residents,
            tokens=sampled.tokens.tolist(),
            depths=depths.tolist(),
            is_finite=sampled.is_finite.tolist(),
            is_stop=stops(sampled.tokens, rows).tolist(),
            logprobs=sampled.logprob.tolist(),
            top_ids=sampled.top_ids.tolist(),
            top_logprobs=sampled.top_logprobs.tolist(),
        )

    def _score(self, chunk: Chunk, x: Tensor) -> PromptScores:
        """Row p of the chunk scores prompt token p + 1; the prompt's last row scores nothing."""
        resident, k = chunk.resident, chunk.resident.join.sampling.prompt_logprobs
        targets = self._slots.prompt[resident.slot, chunk.first + 1 : chunk.end + (not chunk.ends_prompt)]
        result = PromptScores(resident, chunk.first + 1, k)
        for first in range(0, len(targets), SCORED_ROWS_AT_ONCE):
            target = targets[first : first + SCORED_ROWS_AT_ONCE]
            clean, is_whole = clean_rows(self._model.head(x[first : first + len(target)]))
            result.is_finite &= bool(is_whole.all())
            report = raw_logprobs(widen(clean), target, torch.full_like(target, k), k)
            result.logprobs.extend(report.logprob.tolist())
            result.top_ids.extend(report.top_ids.flatten().tolist())
            result.top_logprobs.extend(report.top_logprobs.flatten().tolist())
        return result
