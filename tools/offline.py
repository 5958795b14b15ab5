"""An engine without a server: requests in, replies out, on one thread.

A scheduler reduced to what benchmarks and checks need: first come, first served, Plans handed straight to the pump.
Every resident's whole life fits the pool; `grow_tokens` says whether its pages come at once or bit by bit. What it
measures is the engine; HTTP, messages and tokenizing are somebody else's time. It decodes the same wire messages that a
gateway would get.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from epicycle.engine.engine import Engine
from epicycle.engine.tick import Tick
from epicycle.kvstore.page_pool import PagePool
from epicycle.kvstore.prefix_keys import chain_keys, chain_root
from epicycle.kvstore.reserve import ReserveRule, lifetime_pages, pages_for, require_fits_ever
from epicycle.kvstore.snapshots import Snapshots
from epicycle.transport.wire.columns import F32, I32, U16, U64, pack, unpack
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, ToGateway, TokenBatch
from epicycle.transport.wire.plan import Evict, Grow, Join, Plan, Resume, StepReport
from epicycle.transport.wire.request import LoopBounds, Sampling

Clock = Callable[[], float]
JOIN_TOKENS = 4096  # of prompts that join in one step: others do while the device is busy with these


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence; `prompt` are token ids. `is_held`: it stops after its first output until `release_held`."""

    prompt: list[int]
    sampling: Sampling
    loops: LoopBounds = field(default_factory=LoopBounds)
    noise_seed: int = 0
    is_held: bool = False

    @property
    def most_tokens(self) -> int:
        return max(1, self.sampling.max_tokens)


@dataclass(kw_only=True)
class Reply:
    """What became of a request; `token_s` are the clock's times at which its tokens were collected."""

    submitted_s: float
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    end: Fin | None = None


@dataclass(kw_only=True)
class Resident:
    """A request in its slot, or saved; `life_pages` are set aside for it, `held_pages` are in its table."""

    rid: int
    request: Request
    gen: int
    life_pages: int
    held_pages: int
    table: list[int] = field(default_factory=list)  # its pages, `held_pages` of them
    has_prompt: bool = False
    saved_tokens: int = 0  # positions that hold anything, while it is saved
    is_returning: bool = False  # it has been away, and nothing of it was heard since


class Offline:
    """Runs requests on one engine. `submit` any time, `step` until it returns False; replies are filled in place.

    `grow_tokens` 0 leases a request's whole life when it joins; more leases its prompt and grows by so many positions.
    `prefix_cache` shares the full pages of prompts that begin alike, as the server does. `watch` as `Engine.new_pump`
    has it. `on_end` is told of every reply that has ended and of the pages that still hold its KV.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock = time.perf_counter,
        grow_tokens: int = 0,
        *,
        prefix_cache: bool = False,
        watch: Callable[[Tick], Tick] | None = None,
    ) -> None:
        self.engine = engine
        self.pump = engine.new_pump(epoch=1, watch=watch)
        self.pool = PagePool(engine.plan.total_pages)
        self.hit_tokens = 0  # prompt tokens that were not computed
        self.preemptions = 0
        self.on_end: Callable[[Reply, list[int]], None] = lambda _reply, _pages: None
        self.attached_pages = 0  # of resumed requests: pages found in the cache instead of being copied back
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._page_tokens = engine.pool.page_tokens
        self._rule = ReserveRule(page_tokens=self._page_tokens, grow_tokens=grow_tokens or None)
        self._gens = [0] * engine.plan.slots
        self._free_slots = list(reversed(range(engine.plan.slots)))
        self._residents: dict[int, Resident] = {}  # by slot
        self._waiting: deque[tuple[int, Request]] = deque()
        self._snapshots = Snapshots(engine.capabilities().host_pages)
        self._leaving: set[int] = set()  # slots whose rows are on their way out
        self._saved: dict[int, Resident] = {}  # by rid
        self._evicts: list[Evict] = []
        self._replies: dict[int, Reply] = {}
        self._ended: list[Reply] = []
        self._grows: list[Grow] = []
        self._seq = 0
        self._rids = 0

    @property
    def running(self) -> int:
        return len(self._residents)

    def submit(self, request: Request) -> Reply:
        """Queue a request. Raises KvError when it could never fit."""
        tokens = len(request.prompt)
        require_fits_ever(tokens, request.most_tokens, self._page_tokens, self.pool.total_pages)
        self._rids += 1
        self._waiting.append((self._rids, request))
        reply = self._replies[self._rids] = Reply(submitted_s=self._clock(), prompt_tokens=tokens)
        return reply

    def run(self, requests: Iterable[Request], streams: int = 0) -> list[Reply]:
        """All requests to their ends, at most `streams` in flight (0: as many as there are slots)."""
        todo = deque(requests)
        limit = streams or len(self._gens)
        replies: list[Reply] = []
        while todo or self._replies:
            while todo and len(self._replies) < limit:
                replies.append(self.submit(todo.popleft()))
            self.step()
        return replies

    def step(self) -> bool:
        """Admit what fits, run a tick, take what is complete; False when nothing is left to do."""
        grows, self._grows = self._grows, []
        evicts, self._evicts = self._evicts, []
        joins, resumes = self._admit()
        if joins or grows or evicts or resumes:
            self._seq += 1
            plan = Plan(epoch=1, seq=self._seq, joins=joins, grows=grows, evicts=evicts, resumes=resumes)
            self.pump.apply(plan)
        self.pump.tick()
        output = self.pump.collect()
        now_s = self._clock()
        for message in output.to_gateways.get(0, []):
            self._take(message, now_s)
        if output.report is not None:
            self._publish(output.report)
            self._free(output.report)
            self._take_saved(output.report)
            self._grow(output.report)
        return bool(self._replies)

    def drain_ended(self) -> list[Reply]:
        """Replies that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def release_held(self) -> None:
        """Let every held resident go on with the next step."""
        for slot, resident in self._residents.items():
            if resident.request.is_held:
                limit_tokens = resident.held_pages * self._page_tokens
                self._grows.append(Grow(slot=slot, gen=resident.gen, pages=b"", limit_tokens=limit_tokens))

    def preempt(self, choose: Callable[[Sequence[int]], int]) -> None:
        """Take one resident off the device with the next step; `choose` picks one of the slots that may be taken.

        It comes back as soon as there is room, before whoever waits. Nobody is taken while more than half of all
        residents are on their way out or back: where copies are slow, rows would do little else.
        """
        returning = sum(resident.is_returning for resident in self._residents.values())
        if 2 * (len(self._leaving) + returning) > len(self._residents):
            return
        slots = [slot for slot in self._residents if slot not in self._leaving]
        slots = [slot for slot in slots if self._residents[slot].held_pages <= self._snapshots.free_pages]
        if not slots:
            return
        slot = choose(slots)
        resident = self._residents[slot]
        host_pages = self._snapshots.begin(resident.rid, resident.held_pages)
        self._leaving.add(slot)
        self._grows = [grow for grow in self._grows if grow.slot != slot]
        self._evicts.append(Evict(slot, resident.gen, "preempt", host_pages=pack(I32, host_pages)))
        self.pool.park(slot)
        self.preemptions += 1

    def _admit(self) -> tuple[list[Join], list[Resume]]:
        joins: list[Join] = []
        resumes: list[Resume] = []
        committed = sum(resident.life_pages for resident in self._residents.values())
        rows_left = JOIN_TOKENS
        while self._waiting and self._free_slots and rows_left > 0:
            rid, request = self._waiting[0]
            rows_left -= len(request.prompt)
            pages = lifetime_pages(len(request.prompt), request.most_tokens, self._page_tokens)
            if committed + pages > self.pool.total_pages:
                break
            committed += pages
            self._waiting.popleft()
            if rid in self._saved:
                resumes.append(self._resume(self._saved.pop(rid)))
            else:
                joins.append(self._join(rid, request, pages))
        return joins, resumes

    def _resume(self, resident: Resident) -> Resume:
        slot, request = self._free_slots.pop(), resident.request
        self._gens[slot] += 1
        resident.gen = self._gens[slot]
        resident.is_returning = True
        self._residents[slot] = resident
        keys = self._keys(request)
        table = self.pool.claim(slot, resident.held_pages, keys, resident.saved_tokens // self._page_tokens)
        resident.table = list(table)
        attached = self.pool.hits_of(slot)
        self.attached_pages += attached
        host_pages = self._snapshots.pages_of(resident.rid)
        self._snapshots.drop(resident.rid)
        return Resume(
            rid=resident.rid,
            slot=slot,
            gen=resident.gen,
            pages=pack(I32, table),
            limit_tokens=resident.held_pages * self._page_tokens,
            attached_pages=attached,
            host_pages=pack(I32, host_pages[attached:]),
        )

    def _join(self, rid: int, request: Request, life_pages: int) -> Join:
        slot = self._free_slots.pop()
        self._gens[slot] += 1
        prompt_tokens = len(request.prompt)
        pages = self._rule.first_pages(prompt_tokens, request.most_tokens)
        self._residents[slot] = Resident(
            rid=rid, request=request, gen=self._gens[slot], life_pages=life_pages, held_pages=pages
        )
        keys = self._keys(request)
        table = self.pool.claim(slot, pages, keys, self._most_hits(request))
        self._residents[slot].table = list(table)
        return Join(
            rid=rid,
            gateway=0,
            slot=slot,
            gen=self._gens[slot],
            prompt=pack(I32, request.prompt),
            pages=pack(I32, table),
            limit_tokens=prompt_tokens if request.is_held else pages * self._page_tokens,
            sampling=request.sampling,
            loops=request.loops,
            prefix_tokens=self.pool.hits_of(slot) * self._page_tokens,
            noise_seed=request.noise_seed,
        )

    def _keys(self, request: Request) -> tuple[bytes, ...]:
        if not self._prefix_cache:
            return ()
        return chain_keys(chain_root(request.noise_seed), pack(I32, request.prompt), self._page_tokens)

    def _most_hits(self, request: Request) -> int:
        """Pages it may share: none with prompt logprobs; where loops share planes nobody writes a shared page again."""
        if request.sampling.prompt_logprobs >= 0:
            return 0
        return (len(request.prompt) - self.engine.pool.facts.serial_prompts) // self._page_tokens

    def _publish(self, report: StepReport) -> None:
        for slot, written in zip(unpack(I32, report.slots), unpack(I32, report.tokens), strict=True):
            resident = self._residents.get(slot)
            if resident is None:
                continue
            resident.is_returning = False
            if not resident.has_prompt and written >= len(resident.request.prompt):
                resident.has_prompt = True
                self.pool.publish(slot)

    def _take_saved(self, report: StepReport) -> None:
        """Rows that have been saved wait at the head of the queue."""
        columns = zip(unpack(I32, report.saved_slots), unpack(I32, report.saved_tokens), strict=True)
        for slot, tokens in columns:
            resident = self._residents.pop(slot)
            resident.saved_tokens = tokens
            resident.has_prompt = tokens >= len(resident.request.prompt)
            self._snapshots.complete(resident.rid, pages_for(tokens, self._page_tokens))
            self.pool.release(slot, has_prompt=resident.has_prompt)
            self._leaving.discard(slot)
            self._free_slots.append(slot)
            self._saved[resident.rid] = resident
            self._waiting.appendleft((resident.rid, resident.request))

    def _grow(self, report: StepReport) -> None:
        """Lease more to the rows whose leases run low; what they may ever need was set aside when they joined."""
        for slot, written in zip(unpack(I32, report.slots), unpack(I32, report.tokens), strict=True):
            resident = self._residents.get(slot)
            if resident is None or slot in self._leaving:
                continue
            request, held = resident.request, resident.held_pages
            more = self._rule.growth_pages(written, held, len(request.prompt), request.most_tokens)
            if more:
                pages = self.pool.grow(slot, more)
                resident.held_pages += more
                resident.table += pages
                limit_tokens = resident.held_pages * self._page_tokens
                self._grows.append(Grow(slot=slot, gen=resident.gen, pages=pack(I32, pages), limit_tokens=limit_tokens))

    def _take(self, message: ToGateway, now_s: float) -> None:
        match message:
            case TokenBatch():
                self._take_tokens(message, now_s)
            case PromptLogprobs(rid=rid, logprobs=column):
                self._replies[rid].prompt_logprobs.extend(unpack(F32, column))
            case PrefixHit(rid=rid, tokens=tokens):
                self._replies[rid].cached_tokens = tokens
                self.hit_tokens += tokens
            case Fin(rid=rid):
                reply = self._replies.pop(rid)
                reply.end = message
                self._ended.append(reply)
                tables = [resident.table for resident in self._residents.values() if resident.rid == rid]
                self.on_end(reply, tables[0] if tables else [])
            case _:
                raise AssertionError(message)

    def _take_tokens(self, batch: TokenBatch, now_s: float) -> None:
        tokens, depths = unpack(I32, batch.tokens), unpack(U16, batch.exit_depths)
        ks = unpack(I32, batch.logprob_k) if batch.logprob_k else [-1] * (len(batch.rids) // 8)
        logprobs = unpack(F32, batch.logprobs)
        at = scored = 0
        for rid, count, k in zip(unpack(U64, batch.rids), unpack(I32, batch.counts), ks, strict=True):
            reply = self._replies[rid]
            reply.tokens.extend(tokens[at : at + count])
            reply.exit_depths.extend(depths[at : at + count])
            reply.token_s.extend([now_s] * count)
            if k >= 0:
                reply.logprobs.extend(logprobs[scored : scored + count])
                scored += count
            at += count

    def _free(self, report: StepReport) -> None:
        for slot in unpack(I32, report.freed_slots):
            resident = self._residents.pop(slot)
            self.pool.release(slot, has_prompt=resident.has_prompt)
            self._snapshots.drop(resident.rid)
            self._leaving.discard(slot)
            self._free_slots.append(slot)
