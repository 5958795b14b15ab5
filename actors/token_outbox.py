"""Tokens on their way to the gateways: sent at once while a gateway keeps up, merged per row while it doesn't.

Owns what no link has taken. What waits is bounded by the residents' outputs (slots x context): a row is one entry
however long it waits. Nothing is dropped while its gateway lives, and nothing ever waits for a gateway. It must not
know slots or why a request ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from epicycle.transport.errors import LinkFull
from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import I32, U64, pack, unpack
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, ToGateway, TokenBatch

ROW_TOKENS = 16_384  # tokens of one row in one batch: with 20 alternatives about 3 MB
BATCH_BYTES = 8 << 20  # a frame holds 64 MiB


@dataclass(slots=True)
class RowTokens:
    """Unsent tokens of one request, as the columns they will travel in."""

    first_index: int
    logprob_k: int
    count: int = 0
    tokens: bytearray = field(default_factory=bytearray)
    exit_depths: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)

    @property
    def bytes_per_token(self) -> int:
        return 6 + (4 + 8 * self.logprob_k if self.logprob_k >= 0 else 0)

    def drop(self, count: int) -> None:
        """The first `count` tokens have been sent."""
        scores = 4 * count if self.logprob_k >= 0 else 0
        tops = scores * max(0, self.logprob_k)
        del self.tokens[: 4 * count], self.exit_depths[: 2 * count], self.logprobs[:scores]
        del self.top_ids[:tops], self.top_logprobs[:tops]
        self.first_index += count
        self.count -= count


class TokenOutbox:
    """One gateway's. Per request the order holds: prompt messages, tokens, Fin. Meant for the executor's thread."""

    def __init__(self) -> None:
        self.merged_rows = 0
        self.sender: Sender | None = None
        self._epoch = 0
        self._prompts: deque[PromptLogprobs | PrefixHit] = deque()
        self._rows: dict[int, RowTokens] = {}
        self._fins: deque[Fin] = deque()

    def __len__(self) -> int:
        """Entries that wait; 0 means that the link has everything."""
        return len(self._prompts) + len(self._rows) + len(self._fins)

    def connect(self, sender: Sender) -> None:
        self.disconnect()
        self.sender = sender
        self.flush()

    def disconnect(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def push(self, messages: Sequence[ToGateway]) -> None:
        """Send in order, or keep what the link refuses."""
        is_through = not len(self)
        for message in messages:
            is_through = is_through and self._try_send(message)
            if not is_through:
                self._keep(message)

    def flush(self) -> bool:
        """Offer what waits; whether the link took everything."""
        while self._prompts:
            if not self._try_send(self._prompts[0]):
                return False
            self._prompts.popleft()
        while self._rows:
            batch, taken = self._batch()
            if not self._try_send(batch):
                return False
            self._forget(taken)
        while self._fins:
            if not self._try_send(self._fins[0]):
                return False
            self._fins.popleft()
        return True

    def _try_send(self, message: ToGateway) -> bool:
        if self.sender is None:
            return False
        try:
            self.sender.send(message)
        except LinkFull:
            return False
        return True

    def _keep(self, message: ToGateway) -> None:
        match message:
            case TokenBatch():
                self._merge(message)
            case PromptLogprobs() | PrefixHit():
                self._prompts.append(message)
            case Fin():
                self._fins.append(message)
            case _:
                raise AssertionError(f"no place for {type(message).__name__}")

    def _merge(self, batch: TokenBatch) -> None:
        """Append every row of `batch` to what waits of it."""
        self._epoch = batch.epoch
        rids, firsts, counts = unpack(U64, batch.rids), unpack(I32, batch.first_index), unpack(I32, batch.counts)
        ks: Sequence[int] = unpack(I32, batch.logprob_k) if batch.logprob_k else [-1] * len(rids)
        at = scores_at = tops_at = 0
        for rid, first_index, count, k in zip(rids, firsts, counts, ks, strict=True):
            row = self._rows.get(rid)
            if row is None:
                row = self._rows[rid] = RowTokens(first_index, k)
            else:
                self.merged_rows += 1
            assert first_index == row.first_index + row.count, (rid, first_index, row.first_index, row.count)
            row.count += count
            row.tokens += batch.tokens[4 * at : 4 * (at + count)]
            row.exit_depths += batch.exit_depths[2 * at : 2 * (at + count)]
            at += count
            if k >= 0:
                row.logprobs += batch.logprobs[4 * scores_at : 4 * (scores_at + count)]
                row.top_ids += batch.top_ids[4 * tops_at : 4 * (tops_at + count * k)]
                row.top_logprobs += batch.top_logprobs[4 * tops_at : 4 * (tops_at + count * k)]
                scores_at += count
                tops_at += count * k

    def _batch(self) -> tuple[TokenBatch, list[tuple[int, int]]]:
        """The next batch, and (rid, tokens) of the rows in it. The rows stay until it has been sent."""
        taken: list[tuple[int, int]] = []
        left_bytes = BATCH_BYTES
        for rid, row in self._rows.items():
            count = min(row.count, ROW_TOKENS)
            left_bytes -= count * row.bytes_per_token
            if taken and left_bytes < 0:
                break
            taken.append((rid, count))
        rows = [(self._rows[rid], count) for rid, count in taken]
        scored = [(row, count) for row, count in rows if row.logprob_k >= 0]
        batch = TokenBatch(
            epoch=self._epoch,
            rids=pack(U64, [rid for rid, _ in taken]),
            first_index=pack(I32, [row.first_index for row, _ in rows]),
            counts=pack(I32, [count for _, count in rows]),
            tokens=b"".join(row.tokens[: 4 * count] for row, count in rows),
            exit_depths=b"".join(row.exit_depths[: 2 * count] for row, count in rows),
            logprob_k=pack(I32, [row.logprob_k for row, _ in rows]) if scored else b"",
            logprobs=b"".join(row.logprobs[: 4 * count] for row, count in scored),
            top_ids=b"".join(row.top_ids[: 4 * count * row.logprob_k] for row, count in scored),
            top_logprobs=b"".join(row.top_logprobs[: 4 * count * row.logprob_k] for row, count in scored),
        )
        return batch, taken

    def _forget(self, taken: list[tuple[int, int]]) -> None:
        for rid, count in taken:
            self._rows[rid].drop(count)
            if not self._rows[rid].count:
                del self._rows[rid]


class TokenOutboxes:
    """By gateway number. One not heard of yet is waited for; one that is gone gets nothing until it is back."""

    def __init__(self) -> None:
        self._outboxes: dict[int, TokenOutbox] = {}
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return sum(len(outbox) for outbox in self._outboxes.values())

    @property
    def merged_rows(self) -> int:
        return sum(outbox.merged_rows for outbox in self._outboxes.values())

    @property
    def refused_sends(self) -> int:
        senders = [outbox.sender for outbox in self._outboxes.values()]
        return sum(sender.stats.rejected for sender in senders if sender is not None)

    def connect(self, number: int, sender: Sender) -> None:
        self._gone.discard(number)
        self._outboxes.setdefault(number, TokenOutbox()).connect(sender)

    def drop(self, number: int) -> None:
        """The gateway died: what it was owed is nobody's."""
        self._gone.add(number)
        outbox = self._outboxes.pop(number, None)
        if outbox is not None:
            outbox.disconnect()

    def push(self, number: int, messages: Sequence[ToGateway]) -> None:
        if number not in self._gone:
            self._outboxes.setdefault(number, TokenOutbox()).push(messages)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.disconnect()
