"""The tick pump: plans in, ticks, messages out.

Owns the resident requests, their leases and their slots: it applies plans and launches ticks; `Results` turns what a
tick did into tokens and ends. Ticks may be launched before earlier ones are complete; what they did is harvested in
order once they are. Rows that ended meanwhile are inert on the device, and their slots are reported free only when the
last tick that may touch them is complete. It must not know sockets, nor the tensors behind a tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from epicycle.engine.flight import Flight, Launched
from epicycle.engine.handover import Handover
from epicycle.engine.host_pages import PageMover
from epicycle.engine.outbox import Outbox, StepOutput
from epicycle.engine.pool import KvPool
from epicycle.engine.results import Results
from epicycle.engine.route import PromptQueue, Resident, TickWork
from epicycle.engine.shelf import Shelf
from epicycle.engine.slots import SlotTable, sampling_params
from epicycle.engine.tick import Tick
from epicycle.engine.tick_planner import TickPlanner
from epicycle.engine.tickets import fence
from epicycle.engine.transfer.events import Ended, Failed, Landed
from epicycle.engine.transfer.port import TransferPort
from epicycle.engine.upload import upload
from epicycle.transport.wire.columns import I32, unpack_list
from epicycle.transport.wire.plan import Drop, Evict, Grow, Join, Plan, Resume
from epicycle.transport.wire.transfer import TransferFailure

PREEMPT = "preempt"  # the reason of an Evict that saves the row


class Pump:
    """One engine's pump for one epoch. Called from one thread. `clock` dates the times in Fin only.

    At most `run_ahead_ticks` ticks are on their way. `fixed_depth` answers whether tokens of a request with this exit
    threshold always take their maximum of loops.
    """

    def __init__(
        self,
        tick: Tick,
        slots: SlotTable,
        pool: KvPool,
        mover: PageMover,
        *,
        epoch: int,
        slot_count: int,
        loops: int,
        chunk_tokens: int,
        fixed_depth: Callable[[float], bool],
        run_ahead_ticks: int = 1,
        poison: bool = False,
        transfers: TransferPort | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tick = tick
        self._slots = slots
        self._pool = pool
        self._slot_count = slot_count
        self._loops = loops
        self._fixed_depth = fixed_depth
        self._run_ahead_ticks = run_ahead_ticks
        self._poison = poison
        self._clock = clock
        self._flight = Flight(sleep)
        self._shelf = Shelf(slots, mover, pool.page_tokens)
        self._residents: dict[int, Resident] = {}
        self._at_head: list[Resident] = []  # the next tick samples their first tokens from head rows
        self._last_gens: dict[int, int] = {}  # by slot
        self._prompts = PromptQueue(pool.facts.serial_prompts, tick.most_chunks)
        self._planner = TickPlanner(tick, self._prompts, loops, chunk_tokens)
        self._handover = Handover(transfers, pool.page_tokens)
        self._out = Outbox(epoch)
        self.counters = self._out.counters
        self._results = Results(self._out, loops, self._is_resident, self._end, clock)

    # Plans

    def apply(self, plan: Plan) -> None:
        """In the order that `Plan` says. A plan of another epoch is dropped, and what names a slot or gen not there."""
        if plan.epoch != self._out.epoch:
            self.counters.stale_messages += 1
            return
        if plan.spilled_pages:
            self._shelf.spill(unpack_list(I32, plan.spilled_pages), unpack_list(I32, plan.spilled_to))
        for drop in plan.drops:
            self._drop(drop)
        for resume in plan.resumes:
            self._resume(resume)
        for evict in plan.evicts:
            self._evict(evict)
        for grow in plan.grows:
            self._grow(grow)
        for join in plan.joins:
            self._join(join)
        self._planner.ordered_rows = plan.knobs.prompt_chunk_tokens or self._planner.ordered_rows
        self._out.plan_seq = plan.seq
        self._out.is_report_due = True

    def reset(self, control_epoch: int) -> None:
        """Drop every slot without Fin; the next report is empty and carries `control_epoch`."""
        for resident in list(self._residents.values()):
            self._release(resident)
        self._last_gens.clear()
        self._flight.forget_slots()
        self._shelf.clear()
        self.counters.spilled_pages = 0
        self._handover.reset()
        self._out.clear()
        self._out.control_epoch = control_epoch
        self._out.plan_seq = 0
        self._out.is_report_due = True

    def has_work(self) -> bool:
        """A row could run now, a tick or a copy is on its way, or something waits to be collected."""
        is_moving = len(self._flight) > 0 or self._flight.is_leaving or self._shelf.is_busy
        has_news = self._handover.has_news or bool(self._at_head)
        return is_moving or has_news or not self._out.is_empty or self._prompts.can_run() or bool(self._runnable())

    def tick(self) -> None:
        """Launch a tick of every row that may run; a no-op where none can.

        Waits, for at most `flight.WAIT_S`, only where as many ticks are on their way as may be, or nothing can be
        launched before one of them is complete. Raises TickError for a tick that the device never finishes.
        """
        self._harvest_complete()
        self._take_transfers()
        if len(self._flight) >= self._run_ahead_ticks and not self._wait():
            return
        if self._at_head:
            self._launch_heads()
        work = self._planner.next_work(self._runnable())
        if work.decode or work.chunks:
            self._launch(work)
            self._harvest_complete()
        elif self._flight:
            self._wait()
        elif self._shelf.is_busy or self._flight.is_leaving:
            self._flight.pause()

    def collect(self) -> StepOutput:
        """What has completed since the last call; never waits."""
        self._harvest_complete()
        self._take_transfers()
        return self._out.take()

    def _take_transfers(self) -> None:
        """What has become of prompts that come from, or go to, other executors."""
        for event, resident in self._handover.take():
            match event:
                case Landed():
                    resident.written_tokens = resident.prompt_tokens
                    self._results.moved(resident)
                    self._at_head.append(resident)
                case Failed(transfer=transfer, code=code, message=message):
                    self._out.failed.append(TransferFailure(transfer, code, message))
                case Ended():
                    if self._is_resident(resident):
                        self._release(resident)
                    self._free(resident)

    def _wait(self) -> bool:
        """Give the oldest tick time to become complete and harvest it; False where it isn't by then."""
        if not self._flight.wait():
            return False
        self._harvest_complete()
        return True

    def _runnable(self) -> list[Resident]:
        return [row for row in self._residents.values() if row.may_run]

    def _launch(self, work: TickWork) -> None:
        """Launch, and bring up to date what the launch alone decides: prompts, and the plans of rows of fixed depth."""
        ticket, depths = self._tick.launch(work), {chunk.depth for chunk in work.chunks}
        for row in work.decode:
            row.plan_loops(work.loops)
        finished = self._prompts.advance(work.chunks, self._loops)
        self._handover.launched(work.chunks, self._loops, ticket.is_complete)
        for chunk in finished:
            if chunk.ends_prompt and chunk.resident.samples:
                chunk.resident.start_decoding()
        self._flight.add(Launched(ticket, work, finished, depths))

    def _launch_heads(self) -> None:
        """Rows whose prompts are in place take their first token, and decode from the next tick on."""
        most = self._tick.most_chunks
        residents, self._at_head = self._at_head[:most], self._at_head[most:]
        for resident in residents:
            resident.start_decoding()
        self._flight.add(Launched(self._tick.launch_heads(residents), TickWork([], []), [], set()))

    def _harvest_complete(self) -> None:
        while (launched := self._flight.take()) is not None:
            result = launched.ticket.result()
            launched.count(self.counters, result)
            self._results.take(launched, result)
        if self._shelf.is_busy or self._flight.is_leaving:
            self._turn_shelf()

    def _join(self, join: Join) -> None:
        if not self._may_enter(join.slot, join.gen):
            return
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
            max_loops=min(join.loops.max_loops or self._loops, self._loops),
            is_fixed_depth=self._fixed_depth(join.loops.exit_threshold),
        )
        self._slots.join(join, prompt, resident.params)
        self._slots.append_pages(join.slot, 0, pages)
        self._spoil(pages[join.prefix_tokens // self._pool.page_tokens :])
        self._residents[join.slot] = resident
        if join.imports is not None:
            self._handover.expect(resident, fence(self._pool.device))
        elif join.head_from >= 0:
            assert join.prefix_tokens >= len(prompt), "a row starts at the head with its whole prompt in its pages"
            resident.written_tokens = cached = len(prompt)
            self._at_head.append(resident)
        elif join.host_pages:
            loaded = unpack_list(I32, join.host_pages)
            self._shelf.bring_in(resident, loaded, join.prefix_tokens // self._pool.page_tokens - len(loaded))
        else:
            self._prompts.add(resident)
        if join.exports is not None:
            self._handover.offer(resident, fence(self._pool.device))
        if join.imports is None:
            self.counters.prompt_tokens += len(prompt)
        if cached:
            self._out.add_hit(join, cached)

    def _may_enter(self, slot: int, gen: int) -> bool:
        """The slot is empty, and a row of this gen is news; it is counted where not."""
        is_stale = gen <= self._last_gens.get(slot, -1)
        if is_stale or slot in self._residents or not 0 <= slot < self._slot_count:
            self.counters.stale_messages += 1
            return False
        self._last_gens[slot] = gen
        return True

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
        self._slots.limit_tokens[grow.slot].fill_(grow.limit_tokens)
        resident.is_final = grow.is_final
        self._results.end_if_dry(resident)

    def _evict(self, evict: Evict) -> None:
        resident = self._find(evict.slot, evict.gen)
        if resident is None:
            return
        if evict.reason == PREEMPT:
            while any(waiting is resident for waiting in self._at_head):
                self._launch_heads()
            self._prompts.drop(resident.slot)
            self._tick.drop(resident.slot)
            self._shelf.park(resident, unpack_list(I32, evict.host_pages), self._flight.launched)
        elif evict.is_silent:
            if resident.join.exports is not None or self._handover.awaits(resident):
                self._leave(resident)
        else:
            self._end(resident, evict.reason, message=evict.message)

    def _resume(self, resume: Resume) -> None:
        """A saved row goes on in another slot and other pages, once those have been filled."""
        if not self._may_enter(resume.slot, resume.gen):
            return
        row = self._shelf.take(resume.rid)
        if row is None:
            self.counters.stale_messages += 1
            return
        resident, pages = row.resident, unpack_list(I32, resume.pages)
        assert resume.limit_tokens <= len(pages) * self._pool.page_tokens, "a lease needs the pages of its positions"
        join = msgspec.structs.replace(
            resident.join,
            slot=resume.slot,
            gen=resume.gen,
            pages=resume.pages,
            limit_tokens=resume.limit_tokens,
            head_to=-1,  # it may be somebody else's by now
        )
        resident.come_back(join, pages)
        self._slots.join(join, unpack_list(I32, join.prompt), resident.params)
        self._slots.append_pages(join.slot, 0, pages)
        self._spoil(pages[resume.attached_pages :])
        self._residents[join.slot] = resident
        self._shelf.bring_back(row, unpack_list(I32, resume.host_pages), resume.attached_pages)

    def _drop(self, drop: Drop) -> None:
        row = self._shelf.take(drop.rid)
        if row is None:
            self.counters.stale_messages += 1
        else:
            self._results.say_end(row.resident, drop.reason, message=drop.message)

    def _turn_shelf(self) -> None:
        saved, back = self._shelf.advance(self._flight.harvested)
        spilled = self._shelf.spilled()
        self.counters.spilled_pages += spilled
        self._out.is_report_due |= spilled > 0
        self._out.freed += self._flight.free_slots()
        for resident in saved:
            self._release(resident)
            self._out.saved.append((resident.slot, resident.join.gen, resident.begun_tokens))
        for resident in back:
            if not resident.is_decoding:
                self._prompts.add(resident)

    def _find(self, slot: int, gen: int) -> Resident | None:
        resident = self._residents.get(slot)
        if resident is None or resident.join.gen != gen:
            self.counters.stale_messages += 1
            return None
        return resident

    # Ends

    def _is_resident(self, resident: Resident) -> bool:
        return self._residents.get(resident.slot) is resident

    def _end(self, resident: Resident, reason: str, *, code: str = "", message: str = "", warning: str = "") -> None:
        """Send the request's terminal and free its slot. Of a row that only computes a prompt nobody hears."""
        if resident.join.exports is None:
            self._results.say_end(resident, reason, code=code, message=message, warning=warning)
        self._leave(resident)

    def _leave(self, resident: Resident) -> None:
        """Take a row off; its slot is free at once, or once no transfer touches it."""
        self._release(resident)
        if not self._handover.leave(resident):
            self._free(resident)

    def _free(self, resident: Resident) -> None:
        """Report the slot free once the last tick that may touch it is complete."""
        self._flight.leave(resident.slot, resident.join.gen, self._shelf.abandon(resident))
        self._out.freed += self._flight.free_slots()

    def _release(self, resident: Resident) -> None:
        self._prompts.drop(resident.slot)
        self._at_head = [waiting for waiting in self._at_head if waiting is not resident]
        self._tick.drop(resident.slot)
        # Whole pages of prompt may live on in the prefix cache; what lies behind them is nobody's now.
        self._spoil(resident.pages[resident.prompt_tokens // self._pool.page_tokens :])
        if resident.outputs > 1:  # else the report may be the first to say that the prompt is written
            self._out.moved.pop(resident.slot, None)
        del self._residents[resident.slot]

    def _spoil(self, pages: list[int]) -> None:
        """Poison pages that change hands, where that was asked for."""
        if self._poison and pages:
            self._pool.poison(upload(pages, torch.int64, self._pool.device))
