"""The tick pump: plans in, ticks, messages out.

Owns the resident requests, their leases and their ends: it applies plans, picks the rows of each tick, and turns what a
tick did into tokens, reports and terminals. EOS, stop ids and limits are judged here. It must not know sockets, nor
the tensors behind a tick: a faster tick replaces `EagerTick` and the host accounts stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from epicycle.engine.outbox import Outbox, StepOutput
from epicycle.engine.pool import KvPool
from epicycle.engine.route import PromptQueue, Resident, TickWork
from epicycle.engine.slots import SlotTable, sampling_params
from epicycle.engine.tick import EagerTick, PromptScores, Samples, TickResult
from epicycle.transport.wire.columns import F32, I32, pack, unpack_list
from epicycle.transport.wire.output import Fin, PromptLogprobs
from epicycle.transport.wire.plan import Evict, Grow, Join, Plan

POOL_WARNING = "the KV pool ran dry: output ends early; serve with more KV memory or fewer slots"


class Pump:
    """One engine's pump for one epoch. Called from one thread; never waits. `clock` dates the times in Fin only."""

    def __init__(
        self,
        tick: EagerTick,
        slots: SlotTable,
        pool: KvPool,
        *,
        epoch: int,
        slot_count: int,
        loops: int,
        chunk_tokens: int,
        poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tick = tick
        self._slots = slots
        self._pool = pool
        self._slot_count = slot_count
        self._loops = loops
        self._poison = poison
        self._clock = clock
        self._residents: dict[int, Resident] = {}
        self._last_gens: dict[int, int] = {}  # by slot
        self._prompts = PromptQueue(chunk_tokens, pool.facts.serial_prompts)
        self._out = Outbox(epoch)
        self.counters = self._out.counters

    # Plans

    def apply(self, plan: Plan) -> None:
        """Evicts, grows, joins, knobs. A plan of another epoch, and what names a slot or gen not there, is dropped."""
        if plan.epoch != self._out.epoch:
            self.counters.stale_messages += 1
            return
        for evict in plan.evicts:
            self._evict(evict)
        for grow in plan.grows:
            self._grow(grow)
        for join in plan.joins:
            self._join(join)
        self._prompts.chunk_tokens = plan.knobs.prompt_chunk_tokens or self._prompts.chunk_tokens
        self._out.plan_seq = plan.seq
        self._out.is_report_due = True

    def reset(self, control_epoch: int) -> None:
        """Drop every slot without Fin; the next report is empty and carries `control_epoch`."""
        for resident in list(self._residents.values()):
            self._release(resident)
        self._last_gens.clear()
        self._out.clear()
        self._out.control_epoch = control_epoch
        self._out.plan_seq = 0
        self._out.is_report_due = True

    def has_work(self) -> bool:
        """A row could run now, or something waits to be collected."""
        return not self._out.is_empty or self._prompts.can_run() or bool(self._runnable())

    def tick(self) -> None:
        """Run one loop of every row that may run; a no-op where none can."""
        work = TickWork(self._runnable(), self._prompts.take())
        if not work.decode and not work.chunks:
            return
        self._count(work)
        self._harvest(self._tick.launch(work))

    def collect(self) -> StepOutput:
        """What has completed since the last call."""
        return self._out.take()

    def _runnable(self) -> list[Resident]:
        return [row for row in self._residents.values() if row.is_decoding and not row.is_starved]

    def _count(self, work: TickWork) -> None:
        counters = self.counters
        counters.count_tick(len(work.decode) + work.prompt_rows)
        counters.decode_row_loops += len(work.decode)
        counters.prompt_row_loops += work.prompt_rows
        counters.mixed_depth_ticks += len(work.depths) > 1

    def _join(self, join: Join) -> None:
        is_stale = join.gen <= self._last_gens.get(join.slot, -1)
        if is_stale or join.slot in self._residents or not 0 <= join.slot < self._slot_count:
            self.counters.stale_messages += 1
            return
        self._last_gens[join.slot] = join.gen
        prompt, pages = unpack_list(I32, join.prompt), unpack_list(I32, join.pages)
        assert join.limit_tokens <= len(pages) * self._pool.page_tokens, "a lease needs the pages of its positions"
        # The last prompt token is always computed: its state is what the first output is sampled from.
        cached = min(join.prefix_tokens, len(prompt) - 1)
        resident = Resident(
            join=join,
            params=sampling_params(join.sampling),
            prompt_tokens=len(prompt),
            limit_tokens=join.limit_tokens,
            pages=pages,
            joined_s=self._clock(),
            written_tokens=cached,
        )
        self._slots.join(join, prompt, resident.params)
        self._slots.append_pages(join.slot, 0, pages)
        self._spoil(pages[join.prefix_tokens // self._pool.page_tokens :])
        self._residents[join.slot] = resident
        self._prompts.add(resident)
        self.counters.prompt_tokens += len(prompt)

    def _grow(self, grow: Grow) -> None:
        resident = self._find(grow.slot, grow.gen)
        if resident is None:
            return
        pages = unpack_list(I32, grow.pages)
        self._slots.append_pages(grow.slot, len(resident.pages), pages)
        self._spoil(pages)
        resident.pages.extend(pages)
        assert grow.limit_tokens <= len(resident.pages) * self._pool.page_tokens, "a lease needs its pages"
        resident.limit_tokens = grow.limit_tokens
        resident.is_final = grow.is_final
        self._end_if_dry(resident)

    def _evict(self, evict: Evict) -> None:
        resident = self._find(evict.slot, evict.gen)
        if resident is not None:
            self._end(resident, evict.reason, message=evict.message)

    def _find(self, slot: int, gen: int) -> Resident | None:
        resident = self._residents.get(slot)
        if resident is None or resident.join.gen != gen:
            self.counters.stale_messages += 1
            return None
        return resident

    # Results

    def _harvest(self, result: TickResult) -> None:
        """Bring the host's accounts up to date, then pass on what was scored and sampled."""
        for resident, leaves in zip(result.work.decode, result.leaves, strict=True):
            resident.loops_done += 1
            if leaves:
                self.counters.loops_saved += self._loops - resident.loops_done
                resident.loops_done = 0
                resident.written_tokens += 1
        finished = self._prompts.advance(result.work.chunks, self._loops)
        for score in result.scores:
            self._pass_scores(score)
        if result.samples is not None:
            self._pass_samples(result.samples)
        for chunk in finished:
            if chunk.resident.slot in self._residents:
                self._after_chunk(chunk.resident, chunk.ends_prompt)

    def _after_chunk(self, resident: Resident, ends_prompt: bool) -> None:
        self._moved(resident)
        if ends_prompt and resident.join.sampling.max_tokens == 0:
            self._end(resident, "length")
        elif not ends_prompt:
            self._after_step(resident)

    def _pass_scores(self, scores: PromptScores) -> None:
        resident = scores.resident
        if not scores.is_finite:
            self._fail(resident, f"prompt token {scores.first}", self._loops)
        elif scores.logprobs:
            message = PromptLogprobs(
                epoch=self._out.epoch,
                rid=resident.join.rid,
                first=scores.first,
                k=scores.k,
                logprobs=pack(F32, scores.logprobs),
                top_ids=pack(I32, scores.top_ids),
                top_logprobs=pack(F32, scores.top_logprobs),
            )
            self._out.scores.setdefault(resident.join.gateway, []).append(message)

    def _pass_samples(self, samples: Samples) -> None:
        for place, resident in enumerate(samples.residents):
            if self._residents.get(resident.slot) is not resident:
                continue  # its prompt scores have failed it
            if not samples.is_finite[place]:
                self._fail(resident, f"output {resident.outputs}", samples.depths[place])
                continue
            self._emit(resident, samples, place)
            self._judge(resident, samples.is_stop[place])

    def _emit(self, resident: Resident, samples: Samples, place: int) -> None:
        """Append one token to its gateway's batch, and count it."""
        columns, k = self._out.tokens_of(resident.join.gateway), resident.join.sampling.logprobs
        columns.rids.append(resident.join.rid)
        columns.first_index.append(resident.outputs)
        columns.tokens.append(samples.tokens[place])
        columns.exit_depths.append(samples.depths[place])
        columns.logprob_k.append(k)
        if k >= 0:
            columns.logprobs.append(samples.logprobs[place])
            columns.top_ids.extend(samples.top_ids[place][:k])
            columns.top_logprobs.extend(samples.top_logprobs[place][:k])
        if not resident.outputs:
            resident.first_token_s = self._clock()
            resident.is_decoding = True
        resident.outputs += 1
        self.counters.generated_tokens += 1
        self._moved(resident)

    def _judge(self, resident: Resident, is_stop: bool) -> None:
        """Does this token end its request?"""
        if is_stop:
            self._end(resident, "stop")
        elif resident.outputs >= resident.join.sampling.max_tokens:
            self._end(resident, "length")
        else:
            self._after_step(resident)

    def _after_step(self, resident: Resident) -> None:
        """A row at the end of its lease waits for growth, or ends where the pool has no more to give."""
        if resident.is_starved and not resident.is_final:
            self.counters.starved_latency += 1  # once a stall: how many ticks it lasts is not the row's doing
        self._end_if_dry(resident)

    def _end_if_dry(self, resident: Resident) -> None:
        if resident.is_final and resident.is_starved:
            self.counters.starved_pool += 1
            self._end(resident, "length", warning=POOL_WARNING)

    def _fail(self, resident: Resident, what: str, depth: int) -> None:
        message = f"request {resident.join.rid}: the logits of {what} are not finite at depth {depth}"
        self._end(resident, "error", code="server_error", message=message)

    def _end(self, resident: Resident, reason: str, *, code: str = "", message: str = "", warning: str = "") -> None:
        """Send the request's terminal and free its slot."""
        now_s = self._clock()
        first_s = resident.first_token_s or now_s
        fin = Fin(
            epoch=self._out.epoch,
            rid=resident.join.rid,
            reason=reason,
            tokens=resident.outputs,
            code=code,
            message=message,
            warning=warning,
            queue_ms=resident.join.queue_ms,
            prefill_ms=(first_s - resident.joined_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
        )
        self._out.ends.setdefault(resident.join.gateway, []).append(fin)
        self._release(resident)
        self._out.freed.append((resident.slot, resident.join.gen))

    def _release(self, resident: Resident) -> None:
        self._prompts.drop(resident.slot)
        self._tick.drop(resident.slot)
        # Whole pages of prompt may live on in the prefix cache; what lies behind them is nobody's now.
        self._spoil(resident.pages[resident.prompt_tokens // self._pool.page_tokens :])
        self._out.moved.pop(resident.slot, None)
        del self._residents[resident.slot]

    def _moved(self, resident: Resident) -> None:
        self._out.moved[resident.slot] = (resident.join.gen, resident.written_tokens)

    def _spoil(self, pages: list[int]) -> None:
        """Poison pages that change hands, where that was asked for."""
        if self._poison and pages:
            self._pool.poison(torch.tensor(pages, device=self._pool.device))
