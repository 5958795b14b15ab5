"""A TickPump without torch: one token per stream and tick, everything about it predictable.

Owns slots, leases and outputs as the real pump does, and honours the same plans; its model is `mock_model`. It must not
know sockets or who waits for the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from epicycle.actors.mock_model import mock_capabilities, mock_depth, mock_key, mock_logprob, mock_token
from epicycle.actors.mock_pages import MockPages
from epicycle.actors.mock_row import MockRow
from epicycle.actors.mock_shelf import MockShelf
from epicycle.actors.ports import TransferPort
from epicycle.transport.config import Config, TransferConfig
from epicycle.transport.tick_counters import TickCounters
from epicycle.transport.token_columns import TokenColumns
from epicycle.transport.wire.columns import F32, I32, pack, unpack, unpack_list
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.output import POOL_WARNING, Fin, PrefixHit, PromptLogprobs, ToGateway
from epicycle.transport.wire.plan import Drop, Evict, Grow, Join, Plan, Resume, StepReport
from epicycle.transport.wire.request import LoopBounds, Sampling


@dataclass
class MockOutput:
    """Meets StepOutput."""

    report: StepReport | None
    to_gateways: dict[int, list[ToGateway]]


class MockPump:
    """Meets TickPump. `tick_s` is slept in every tick that has rows; `clock` only dates the Fin's times."""

    def __init__(
        self,
        capabilities: Capabilities,
        epoch: int,
        tick_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._facts = capabilities
        self._epoch = epoch
        self._tick_s = tick_s
        self._clock = clock
        self._sleep = sleep
        self._chunk_tokens = capabilities.prompt_chunk_tokens
        self._pages = MockPages(capabilities.page_tokens)
        self._control_epoch = 0
        self._plan_seq = 0
        self.counters = TickCounters()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._rows: dict[int, MockRow] = {}
        self._shelf: MockShelf[MockRow] = MockShelf()
        self._saved: list[tuple[int, int, int]] = []  # slot, gen, positions that hold anything
        self._moved: dict[int, tuple[int, int]] = {}  # slot -> gen, positions that hold KV
        self._freed: list[tuple[int, int]] = []
        self._batches: dict[int, TokenColumns] = {}
        self._before: dict[int, list[ToGateway]] = {}  # messages ahead of the batch: prompts'
        self._fins: dict[int, list[Fin]] = {}
        self._has_report = False

    def reset(self, control_epoch: int) -> None:
        self._forget_rows()
        self._control_epoch = control_epoch
        self._plan_seq = 0
        self.counters.spilled_pages = 0
        self._has_report = True

    def apply(self, plan: Plan) -> None:
        if plan.epoch != self._epoch:
            self.counters.stale_messages += 1
            return
        self._pages.spill(unpack_list(I32, plan.spilled_pages), unpack_list(I32, plan.spilled_to))
        self.counters.spilled_pages += len(plan.spilled_pages) // 4
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
        self._chunk_tokens = plan.knobs.prompt_chunk_tokens or self._chunk_tokens
        self._plan_seq = plan.seq
        self._has_report = True

    def has_work(self) -> bool:
        return self._has_report or bool(self._fins) or self._shelf.is_busy or bool(self._runnable())

    def _runnable(self) -> list[MockRow]:
        moving = self._shelf.is_moving
        return [row for row in self._rows.values() if not moving(row.join.slot) and not self._is_starved(row)]

    def tick(self) -> None:
        """Every row that may write its next position advances; the others wait for their leases to grow."""
        for row in self._shelf.tick():
            self._saved.append((row.join.slot, row.join.gen, row.written_tokens))
            self._moved.pop(row.join.slot, None)
            self._shelf.away[row.join.rid] = row
            del self._rows[row.join.slot]
        rows = self._runnable()
        if not rows:
            return
        if self._tick_s > 0:
            self._sleep(self._tick_s)
        self.counters.count_tick(len(rows))
        self.counters.mixed_depth_ticks += len({row.outputs == 0 for row in rows}) > 1
        for row in rows:
            if row.prefill_ticks:
                self._prefill(row)
            elif not row.outputs:
                self._start_at_head(row)
            else:
                self._decode(row)

    def collect(self) -> MockOutput:
        to_gateways = self._before
        for gateway, batch in self._batches.items():
            to_gateways.setdefault(gateway, []).append(batch.pack(self._epoch))
        for gateway, fins in self._fins.items():
            to_gateways.setdefault(gateway, []).extend(fins)
        report = self._report() if self._has_report or self._moved or self._freed or self._saved else None
        self._before, self._batches, self._fins = {}, {}, {}
        self._moved, self._freed, self._saved, self._has_report = {}, [], [], False
        return MockOutput(report=report, to_gateways=to_gateways)

    def _report(self) -> StepReport:
        return StepReport(
            epoch=self._epoch,
            control_epoch=self._control_epoch,
            plan_seq=self._plan_seq,
            slots=pack(I32, self._moved),
            gens=pack(I32, [gen for gen, _ in self._moved.values()]),
            tokens=pack(I32, [tokens for _, tokens in self._moved.values()]),
            freed_slots=pack(I32, [slot for slot, _ in self._freed]),
            freed_gens=pack(I32, [gen for _, gen in self._freed]),
            saved_slots=pack(I32, [slot for slot, _, _ in self._saved]),
            saved_gens=pack(I32, [gen for _, gen, _ in self._saved]),
            saved_tokens=pack(I32, [tokens for _, _, tokens in self._saved]),
            **self.counters.report_fields(),
        )

    def _join(self, join: Join) -> None:
        if join.slot in self._rows or not 0 <= join.slot < self._facts.slots:
            self.counters.stale_messages += 1
            return
        prompt = unpack(I32, join.prompt)
        self._pages.join(join)
        # The last prompt token is computed unless its head row is kept: the first output comes from it.
        cached_tokens = len(prompt) if join.head_from >= 0 else min(join.prefix_tokens, len(prompt) - 1)
        left_tokens = len(prompt) - cached_tokens
        self._rows[join.slot] = MockRow(
            join=join,
            key=mock_key(prompt),
            prompt_tokens=len(prompt),
            cached_tokens=cached_tokens,
            stop_ids=frozenset(unpack_list(I32, join.sampling.stop_ids)),
            limit_tokens=join.limit_tokens,
            pages=len(join.pages) // 4,
            prefill_ticks=-(-left_tokens // self._chunk_tokens) * self._facts.loops,
            written_tokens=cached_tokens,
            joined_s=self._clock(),
        )
        if join.host_pages:
            self._shelf.come(join.slot, self._rows[join.slot])
        self.counters.prompt_tokens += len(prompt)
        if cached_tokens:
            hit = PrefixHit(self._epoch, join.rid, cached_tokens)
            self._before.setdefault(join.gateway, []).append(hit)

    def _find(self, slot: int, gen: int) -> MockRow | None:
        row = self._rows.get(slot)
        if row is None or row.join.gen != gen:
            self.counters.stale_messages += 1
            return None
        return row

    def _grow(self, grow: Grow) -> None:
        row = self._find(grow.slot, grow.gen)
        if row is None:
            return
        self._pages.grow(grow)
        row.pages += len(grow.pages) // 4
        assert grow.limit_tokens <= row.pages * self._facts.page_tokens, grow
        row.limit_tokens = grow.limit_tokens
        row.is_final = grow.is_final
        if row.is_final and not row.prefill_ticks:
            self._end_if_dry(row)

    def _evict(self, evict: Evict) -> None:
        row = self._find(evict.slot, evict.gen)
        if row is None:
            return
        if evict.reason == "preempt":
            self._pages.save(row.join.rid, unpack_list(I32, evict.host_pages))
            self._shelf.leave(row.join.slot, row)
        else:
            self._finish(row, evict.reason, message=evict.message)

    def _resume(self, resume: Resume) -> None:
        row = self._shelf.away.pop(resume.rid, None)
        if row is None:
            self.counters.stale_messages += 1
            return
        assert resume.slot not in self._rows, resume
        row.join = msgspec.structs.replace(row.join, slot=resume.slot, gen=resume.gen, pages=resume.pages)
        row.pages, row.limit_tokens = len(resume.pages) // 4, resume.limit_tokens
        host_pages = unpack_list(I32, resume.host_pages)
        self._pages.load(row.join, row.written_tokens, resume.attached_pages, host_pages)
        self._rows[resume.slot] = row
        self._shelf.come(resume.slot, row)

    def _drop(self, drop: Drop) -> None:
        row = self._shelf.away.pop(drop.rid, None)
        if row is None:
            self.counters.stale_messages += 1
        else:
            self._say_end(row, drop.reason, message=drop.message)

    def _is_starved(self, row: MockRow) -> bool:
        return not row.prefill_ticks and row.outputs > 0 and row.written_tokens >= row.limit_tokens

    def _prefill(self, row: MockRow) -> None:
        """One loop of one chunk; the last loop of the last chunk samples the first output."""
        row.prefill_ticks -= 1
        loops = self._facts.loops
        chunks_left = -(-row.prefill_ticks // loops)
        written = max(row.cached_tokens, row.prompt_tokens - chunks_left * self._chunk_tokens)
        self.counters.prompt_row_loops += min(self._chunk_tokens, row.prompt_tokens - row.cached_tokens)
        if written > row.written_tokens:
            self._score_prompt(row, max(1, row.written_tokens), written)
            row.written_tokens = written
            self._moved[row.join.slot] = (row.join.gen, row.written_tokens)
        if row.prefill_ticks:
            return
        self._pages.write(row.join)
        row.first_token_s = self._clock()
        if row.join.sampling.max_tokens == 0:
            self._finish(row, "length")
        else:
            self._sample(row)

    def _score_prompt(self, row: MockRow, first: int, end: int) -> None:
        k = row.join.sampling.prompt_logprobs
        if k < 0 or end <= first:
            return
        ids = unpack(I32, row.join.prompt)[first:end]
        tops = [self._top(token, k) for token in ids]
        message = PromptLogprobs(
            epoch=self._epoch,
            rid=row.join.rid,
            first=first,
            k=k,
            logprobs=pack(F32, [mock_logprob(token) for token in ids]),
            top_ids=pack(I32, [top for row_tops in tops for top in row_tops]),
            top_logprobs=pack(F32, [mock_logprob(row_tops[0]) for row_tops in tops for _ in row_tops]),
        )
        self._before.setdefault(row.join.gateway, []).append(message)

    def _top(self, token: int, k: int) -> list[int]:
        """`k` alternatives, the chosen token first."""
        return [(token + rank) % self._facts.vocab_size for rank in range(k)]

    def _start_at_head(self, row: MockRow) -> None:
        row.first_token_s = self._clock()
        self._sample(row)

    def _decode(self, row: MockRow) -> None:
        row.written_tokens += 1
        self._sample(row)

    def _sample(self, row: MockRow) -> None:
        """Emit one output and judge whether it was the last."""
        index, sampling, facts = row.outputs, row.join.sampling, self._facts
        token = mock_token(row.key, index, facts.vocab_size)
        depth = mock_depth(row.key, index, row.join.loops, facts.loops)
        row.outputs += 1
        self._moved[row.join.slot] = (row.join.gen, row.written_tokens)
        self.counters.generated_tokens += 1
        if index:
            self.counters.decode_row_loops += depth
            self.counters.loops_saved += facts.loops - depth
        self._emit(row, index, token, depth)
        if token in row.stop_ids and row.outputs >= sampling.min_tokens:
            self._finish(row, "stop")
        elif row.outputs >= sampling.max_tokens:
            self._finish(row, "length")
        elif row.is_final:
            self._end_if_dry(row)
        elif self._is_starved(row):
            self.counters.starved_latency += 1  # once a stall: how many ticks it lasts is not the row's doing

    def _end_if_dry(self, row: MockRow) -> None:
        """The pool has no more for this row: it ends where its lease does."""
        if self._is_starved(row):
            self.counters.starved_pool += 1
            self._finish(row, "length", warning=POOL_WARNING)

    def _emit(self, row: MockRow, index: int, token: int, depth: int) -> None:
        batch = self._batches.setdefault(row.join.gateway, TokenColumns())
        k = row.join.sampling.logprobs
        batch.rids.append(row.join.rid)
        batch.first_index.append(index)
        batch.tokens.append(token)
        batch.exit_depths.append(depth)
        batch.logprob_k.append(k)
        if k >= 0:
            batch.logprobs.append(mock_logprob(token))
            batch.top_ids.extend(self._top(token, k))
            batch.top_logprobs.extend([mock_logprob(token)] * k)

    def _finish(self, row: MockRow, reason: str, message: str = "", warning: str = "") -> None:
        self._say_end(row, reason, message, warning)
        self._shelf.forget(row.join.slot)
        self._freed.append((row.join.slot, row.join.gen))
        del self._rows[row.join.slot]

    def _say_end(self, row: MockRow, reason: str, message: str = "", warning: str = "") -> None:
        now_s = self._clock()
        first_s = row.first_token_s or now_s
        fin = Fin(
            epoch=self._epoch,
            rid=row.join.rid,
            reason=reason,
            tokens=row.outputs,
            message=message,
            warning=warning,
            queue_ms=row.join.queue_ms,
            prefill_ms=(first_s - row.joined_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
        )
        self._fins.setdefault(row.join.gateway, []).append(fin)


class MockEngine:
    """Meets what the executor asks of an engine; `config.executor` says how fast its ticks are."""

    def __init__(self, config: Config) -> None:
        self._facts = mock_capabilities(config)
        self._tick_s = config.executor.mock_tick_ms / 1e3

    def capabilities(self) -> Capabilities:
        return self._facts

    def canary(self) -> None:
        """One request of one token, on a pump of its own."""
        pump = MockPump(self._facts, epoch=0)
        pump.apply(Plan(epoch=0, seq=1, joins=[_canary_join()]))
        fins: list[Fin] = []
        while pump.has_work():
            pump.tick()
            fins += [message for message in pump.collect().to_gateways.get(0, []) if isinstance(message, Fin)]
        assert [(fin.reason, fin.tokens) for fin in fins] == [("length", 1)], fins

    def open_port(self, config: TransferConfig, name: str, epoch: int, receiver: object) -> TransferPort | None:
        """It has no KV to exchange."""
        return None

    def new_pump(self, epoch: int) -> MockPump:
        return MockPump(self._facts, epoch, self._tick_s)

    def beat_counters(self) -> dict[str, float]:
        return {"vram_bytes": 0.0}


def _canary_join() -> Join:
    return Join(
        rid=1,
        gateway=0,
        slot=0,
        gen=1,
        prompt=pack(I32, [1]),
        pages=pack(I32, [0]),
        limit_tokens=1,
        sampling=Sampling(max_tokens=1, temperature=0.0),
        loops=LoopBounds(),
    )
