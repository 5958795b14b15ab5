"""The in-flight table: the one arbiter of how a request ends. The first terminal wins, later ones are counted.

Owns rids and the entries by rid. Messages of another epoch, of rids it doesn't know, and tokens already seen are
dropped and counted. Must not know HTTP or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from epicycle.actors.gateway.cache_resets import CacheResets
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.pieces import TokenLogprob
from epicycle.actors.gateway.sequence import Owner, Sequence, token_logprobs
from epicycle.transport.wire.columns import F32, I32, U16, U64, unpack
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, ToGateway, TokenBatch
from epicycle.transport.wire.request import Accepted, CacheReset, Rejected, Verdict

COUNTER_BITS = 40
EPOCH_BITS = 16
CANCELLED_LIMIT = 1 << 16


@dataclass
class TableCounts:
    """What was dropped, and why."""

    other_epoch: int = 0  # messages of an executor that is gone
    late_tokens: int = 0  # of a sequence that has ended
    repeated_tokens: int = 0
    late_terminals: int = 0  # second terminals
    acknowledged: int = 0  # terminals of what was cancelled here: expected


class Table:
    """All methods on the gateway's loop."""

    def __init__(self, gateway_number: int, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = gateway_number << (COUNTER_BITS + EPOCH_BITS) | (epoch % (1 << EPOCH_BITS)) << COUNTER_BITS
        self._made = 0
        self._clock = clock
        self._entries: dict[int, Sequence] = {}
        self._cancelled: dict[int, None] = {}
        self.counts = TableCounts()
        self.cache_resets = CacheResets()
        self.progress = 0
        self.executors: dict[int, str] = {}  # those that are up, name by epoch
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    async def wait_empty(self) -> None:
        """Until nothing is in flight."""
        while self._entries:
            self._emptied.clear()
            await self._emptied.wait()

    def new_rid(self) -> int:
        self._made += 1
        assert self._made < 1 << COUNTER_BITS
        return self._base | self._made

    def add(self, sequence: Sequence) -> None:
        assert sequence.rid not in self._entries
        self._entries[sequence.rid] = sequence

    def release(self, rid: int, *, is_cancelled: bool) -> bool:
        """End `rid` here; whether it was still open. `is_cancelled`: its other terminal will come as an answer."""
        if self._pop(rid) is None:
            return False
        if is_cancelled:
            self._cancelled[rid] = None
            if len(self._cancelled) > CANCELLED_LIMIT:
                del self._cancelled[next(iter(self._cancelled))]
        return True

    def on_verdicts(self, messages: list[Verdict]) -> None:
        owners: dict[Owner, None] = {}
        for message in messages:
            match message:
                case Accepted(rid=rid, executor_epoch=epoch):
                    entry = self._entries.get(rid)
                    if entry is not None:
                        self.progress += 1
                        entry.executor_epoch = entry.executor_epoch if entry.count else epoch
                        entry.owner.on_accepted(entry)
                case Rejected(rid=rid):
                    entry = self._take_terminal(rid)
                    if entry is not None:
                        entry.owner.on_rejected(entry, message)
                        owners[entry.owner] = None
                case CacheReset(ref=ref, freed_pages=freed_pages):
                    self.cache_resets.answer(ref, freed_pages)
                case _:
                    raise AssertionError(message)
        _flush(owners)

    def on_output(self, messages: list[ToGateway]) -> None:
        owners: dict[Owner, None] = {}
        now_s = self._clock()
        for message in messages:
            if message.epoch not in self.executors:
                self.counts.other_epoch += 1
                continue
            match message:
                case TokenBatch():
                    self._on_tokens(message, now_s, owners)
                case PromptLogprobs():
                    self._on_prompt_logprobs(message)
                case PrefixHit(rid=rid, tokens=tokens):
                    entry = self._entries.get(rid)
                    if entry is not None and entry.count and entry.executor_epoch != message.epoch:
                        self.counts.other_epoch += 1  # it began elsewhere, without a token, and runs here
                    elif entry is not None:
                        entry.executor_epoch = message.epoch
                        entry.cached_tokens = tokens
                case Fin(rid=rid):
                    entry = self._take_terminal(rid)
                    if entry is not None:
                        entry.owner.on_fin(entry, message)
                        owners[entry.owner] = None
                case _:
                    raise AssertionError(message)
        _flush(owners)

    def fail_executor(self, epoch: int, code: str, message: str) -> None:
        """What ran on one executor, as far as it is known here, ends now; of the rest control knows.

        Control is told, since it may be about to run one of them again.
        """
        owners: dict[Owner, None] = {}
        for entry in [entry for entry in self._entries.values() if entry.executor_epoch == epoch]:
            if entry.rid in self._entries:  # one failing choice ends the others
                entry.owner.on_lost(entry, code, message)
                owners[entry.owner] = None
        _flush(owners)

    def fail_all(self, code: str, message: str) -> None:
        """Everything in flight ends now."""
        owners: dict[Owner, None] = {}
        while self._entries:
            rid = next(iter(self._entries))
            entry = self._entries[rid]
            self._pop(rid)
            entry.owner.on_lost(entry, code, message)
            owners[entry.owner] = None
        self._cancelled.clear()
        self.cache_resets.fail_all(ApiError(code, message))
        _flush(owners)

    def _take_terminal(self, rid: int) -> Sequence | None:
        """The entry that this terminal ends; None when something else has ended it before."""
        entry = self._pop(rid)
        if entry is None and rid in self._cancelled:
            del self._cancelled[rid]
            self.counts.acknowledged += 1
        elif entry is None:
            self.counts.late_terminals += 1
        return entry

    def _pop(self, rid: int) -> Sequence | None:
        entry = self._entries.pop(rid, None)
        if entry is not None:
            self.progress += 1
            if not self._entries:
                self._emptied.set()
        return entry

    def _on_tokens(self, batch: TokenBatch, now_s: float, owners: dict[Owner, None]) -> None:
        tokens: list[int] = unpack(I32, batch.tokens).tolist()
        depths: list[int] = unpack(U16, batch.exit_depths).tolist()
        rids = unpack(U64, batch.rids).tolist()
        counts = unpack(I32, batch.counts).tolist()
        ks = unpack(I32, batch.logprob_k).tolist() if batch.logprob_k else [-1] * len(rids)
        columns = _LogprobColumns(batch)
        at = 0
        for rid, first, count, k in zip(rids, unpack(I32, batch.first_index).tolist(), counts, ks, strict=True):
            end = at + count
            logprobs = columns.take(count, k) if k >= 0 else None
            entry = self._entries.get(rid)
            if entry is None:
                self.counts.late_tokens += count
            else:
                self.counts.repeated_tokens += entry.accept(first, tokens[at:end], depths[at:end], logprobs, now_s)
                entry.executor_epoch = batch.epoch
                owners[entry.owner] = None
            at = end
        self.progress += 1

    def _on_prompt_logprobs(self, message: PromptLogprobs) -> None:
        entry = self._entries.get(message.rid)
        if entry is None:
            return
        entry.executor_epoch = message.epoch
        logprobs = unpack(F32, message.logprobs).tolist()
        tops = unpack(I32, message.top_ids).tolist(), unpack(F32, message.top_logprobs).tolist()
        entry.accept_prompt_logprobs(message, token_logprobs(message.k, logprobs, *tops))
        self.progress += 1


class _LogprobColumns:
    """Reads a batch's logprob columns row after row; they hold the rows with logprobs only."""

    def __init__(self, batch: TokenBatch) -> None:
        self._logprobs = unpack(F32, batch.logprobs)
        self._top_ids = unpack(I32, batch.top_ids)
        self._top_logprobs = unpack(F32, batch.top_logprobs)
        self._at = 0
        self._top_at = 0

    def take(self, count: int, k: int) -> list[TokenLogprob]:
        logprobs = self._logprobs[self._at : self._at + count].tolist()
        tops = slice(self._top_at, self._top_at + count * k)
        self._at += count
        self._top_at = tops.stop
        return token_logprobs(k, logprobs, self._top_ids[tops].tolist(), self._top_logprobs[tops].tolist())


def _flush(owners: dict[Owner, None]) -> None:
    for owner in owners:
        owner.flush()
