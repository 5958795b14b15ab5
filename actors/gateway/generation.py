"""One request on its way: its sequences, what they have yielded, and the one end they come to.

Owns the request's state between validation and the last byte: submits, hands pieces to the sink, cancels what is still
open when one sequence fails or the client leaves. The same path serves HTTP and ZeroMQ. Must not know either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec
import structlog

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.metrics import GatewayMetrics
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece, Sink, Usage
from epicycle.actors.gateway.sequence import Sequence
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.table import COUNTER_BITS, EPOCH_BITS, Table
from epicycle.actors.gateway.tokenizer import ServedTokenizer
from epicycle.actors.gateway.watching import Watcher
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.output import Fin
from epicycle.transport.wire.request import Rejected, Submit

_CODE_OF_REASON = {"deadline": "timeout", "shutdown": "draining", "cancelled": "cancelled"}


_log = structlog.get_logger()


class Links(Protocol):
    """What a generation asks of the links to control."""

    async def submit(self, message: Submit) -> None: ...

    def cancel(self, rid: int, cause: str) -> None: ...


class Generation:
    """Meets Owner. `start` once; `close` always, whatever happened."""

    def __init__(
        self,
        spec: Spec,
        sink: Sink,
        table: Table,
        links: Links,
        metrics: GatewayMetrics,
        tokenizer: ServedTokenizer | None,
        watchers: Seq[Watcher] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._sink = sink
        self._table = table
        self._links = links
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._is_first = True
        self._is_over = False
        self._sequences = [Sequence(table.new_rid(), at, spec, tokenizer, self) for at in range(spec.choices)]
        self._open = dict.fromkeys(self._sequences)
        self._watchers = watchers
        for watcher in watchers:
            watcher.on_start(self._sequences)

    async def start(self) -> None:
        """Submit every sequence. A refusal of the link fails the request; it is not raised."""
        for sequence in self._sequences:
            if self._is_over:
                return
            self._table.add(sequence)
            try:
                for watcher in self._watchers:
                    watcher.on_submitted(sequence)
                await self._links.submit(self._submit_of(sequence))
            except ApiError as error:
                self._table.release(sequence.rid, is_cancelled=False)
                self._metrics.rejections[error.code] += 1
                self._open.pop(sequence, None)
                self._fail(error)
                self.flush()
                return

    def close(self, cause: str = "client") -> None:
        """Cancel whatever is still open, without a word to the sink. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._metrics.aborted(cause)
        self._metrics.finished("cancelled", self._clock() - self._started_s)
        self._cancel_open(cause)
        self._tell_end("cancelled")

    def fail(self, error: ApiError, cause: str) -> None:
        """End it with `error`, for `cause` (slow_client)."""
        if not self._is_over:
            self._metrics.aborted(cause)
            self._fail(error, cause)
            self.flush()

    def on_piece(self, sequence: Sequence, piece: Piece) -> None:
        if self._is_over:
            return
        self._sink.on_piece(piece)
        for watcher in self._watchers:
            watcher.on_piece(piece)
        if piece.token != NO_TOKEN:
            self._metrics.loops_per_token.observe(piece.depth)
        if piece.finish_reason is not None:
            self._metrics.finished(piece.finish_reason, self._clock() - self._started_s)
            self._open.pop(sequence, None)

    def on_stop_string(self, sequence: Sequence) -> None:
        self._table.release(sequence.rid, is_cancelled=True)
        self._links.cancel(sequence.rid, "stop")
        self._end_if_complete()

    def on_first_token(self) -> None:
        if self._is_first:
            self._is_first = False
            self._metrics.ttft.observe(self._clock() - self._started_s)

    def on_token_gap(self, gap_s: float) -> None:
        self._metrics.itl.observe(gap_s)

    def on_accepted(self, sequence: Sequence) -> None:
        if not self._is_over:
            self._sink.on_accepted()
            for watcher in self._watchers:
                watcher.on_accepted(sequence)

    def on_rejected(self, sequence: Sequence, rejected: Rejected) -> None:
        self._open.pop(sequence, None)
        self._fail(ApiError(rejected.code, rejected.message, rejected.param or None, rejected.retry_after_s or -1))

    def on_fin(self, sequence: Sequence, fin: Fin) -> None:
        self._metrics.timed(fin)
        for watcher in self._watchers:
            watcher.on_fin(sequence, fin)
        if fin.reason in ("stop", "length") and fin.tokens <= sequence.count:
            if fin.warning:
                _log.warning("ended_early", rid=sequence.rid, tokens=sequence.count, warning=fin.warning)
            sequence.finish(fin.reason)
            self._end_if_complete()
            return
        self._open.pop(sequence, None)
        self._fail(_error_of(fin, sequence.count))

    def on_lost(self, sequence: Sequence, code: str, message: str) -> None:
        if sequence in self._open and self._table.release(sequence.rid, is_cancelled=True):
            self._links.cancel(sequence.rid, "client")
        self._open.pop(sequence, None)
        self._fail(ApiError(code, message))

    def flush(self) -> None:
        self._sink.flush()

    def _fail(self, error: ApiError, cause: str = "client") -> None:
        if self._is_over:
            return
        self._is_over = True
        self._metrics.failed(error.code, self._clock() - self._started_s)
        self._cancel_open(cause)
        self._tell_end("error", error)
        self._sink.on_failed(error)

    def _cancel_open(self, cause: str) -> None:
        for sequence in self._open:
            if self._table.release(sequence.rid, is_cancelled=True):
                self._links.cancel(sequence.rid, cause)
        self._open.clear()

    def _end_if_complete(self) -> None:
        if not self._open and not self._is_over:
            self._is_over = True
            self._tell_end("")
            self._sink.on_done(self._usage())

    def _tell_end(self, cut: str, error: ApiError | None = None) -> None:
        for watcher in self._watchers:
            watcher.on_end(cut, error)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self.spec.prompts),
            completion_tokens=sum(sequence.count for sequence in self._sequences),
            loops=sum(sequence.loops for sequence in self._sequences),
            cached_tokens=sum(sequence.cached_tokens for sequence in self._sequences[:: self.spec.n]),
        )

    def _submit_of(self, sequence: Sequence) -> Submit:
        spec, number = self.spec, sequence.index // self.spec.n
        return Submit(
            rid=sequence.rid,
            gateway=sequence.rid >> (COUNTER_BITS + EPOCH_BITS),
            prompt=pack(I32, spec.prompts[number].ids),
            sampling=msgspec.structs.replace(spec.samplings[number], choice=sequence.index % spec.n),
            loops=spec.loops[number],
            priority=spec.priority,
            group=self._sequences[0].rid if spec.choices > 1 else 0,
            noise_seed=spec.noise_seed,
            cache_salt=spec.cache_salt,
            session_id=spec.session_id,
        )


def _error_of(fin: Fin, count: int) -> ApiError:
    """What a client is told of a bad end, or of a good one whose tokens didn't all arrive."""
    if fin.reason in ("stop", "length"):
        return ApiError("server_error", f"only {count} of {fin.tokens} tokens arrived from the executor")
    code = fin.code or _CODE_OF_REASON.get(fin.reason, "server_error")
    return ApiError(code, fin.message or f"the request ended early: {fin.reason}")
