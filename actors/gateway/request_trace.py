"""One request as OpenTelemetry spans: its root, and one span per stage at the gateway, the scheduler and the executor.

Stages of other processes are put together here, from the durations in each choice's Fin, laid end to end from its
submit; so neither the wire nor the executor's tick knows of tracing. A choice whose Fin never came (a stop string, a
client that left) has the times the gateway saw itself. Owns the stamps of one request; must not know exporters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece
from epicycle.actors.gateway.sequence import Sequence
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.text import DetokenizerClock
from epicycle.actors.gateway.watching import Watcher
from epicycle.transport.wire.output import Fin

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Attributes = dict[str, str | int | float]
NS_PER_MS = 1e6


@dataclass(slots=True)
class _Choice:
    """Epoch nanoseconds; 0: has not happened."""

    detokenizer: DetokenizerClock
    submitted: int = 0
    accepted: int = 0
    first: int = 0
    last: int = 0
    tokens: int = 0
    loops: int = 0
    reason: str = ""
    executor: str = ""
    fin: Fin | None = None

    def bounds(self) -> tuple[int, int, int, int]:
        """Begin of queue, prefill and decode, and the end of decode."""
        if self.fin is None:
            accepted = self.accepted or self.first or self.last
            return self.submitted, accepted, self.first or accepted, self.last or self.first or accepted
        begin, bounds = float(self.submitted), [self.submitted]
        for spent_ms in (self.fin.queue_ms, self.fin.prefill_ms, self.fin.decode_ms):
            begin += spent_ms * NS_PER_MS
            bounds.append(int(begin))
        return bounds[0], bounds[1], bounds[2], bounds[3]


class RequestTrace(Watcher):
    """A context around the whole request, in which spans are made at the end; `validated` when the body is."""

    def __init__(
        self,
        tracer: Tracer,
        root: Span,
        context: Context,
        executors: Mapping[int, str],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`executors`: their names by epoch."""
        self._tracer = tracer
        self._root = root
        self._context = context
        self._executors = executors
        self._clock_ns = clock_ns
        self._begun = clock_ns()
        self._validated = 0
        self._ended = 0
        self._choices: list[_Choice] = []
        self._cut = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ApiError):
            self._fail(error)
        self._make_spans()

    def validated(self, spec: Spec) -> None:
        self._validated = self._clock_ns()
        prompt_tokens = sum(len(prompt.ids) for prompt in spec.prompts)
        self._root.set_attributes(
            {
                "gen_ai.operation.name": "chat" if spec.is_chat else "text_completion",
                "gen_ai.request.model": spec.model_id,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "epicycle.choices": spec.choices,
            }
        )

    def on_start(self, sequences: Seq[Sequence]) -> None:
        self._choices = [_Choice(sequence.time_detokenizer()) for sequence in sequences]

    def on_submitted(self, sequence: Sequence) -> None:
        self._choices[sequence.index].submitted = self._clock_ns()

    def on_accepted(self, sequence: Sequence) -> None:
        choice = self._choices[sequence.index]
        choice.accepted = self._clock_ns()
        choice.executor = self._executors.get(sequence.executor_epoch, "")

    def on_piece(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.last = self._clock_ns()
        choice.first = choice.first or choice.last
        if piece.token != NO_TOKEN:
            choice.tokens += 1
            choice.loops += piece.depth
        choice.reason = piece.finish_reason or choice.reason

    def on_fin(self, sequence: Sequence, fin: Fin) -> None:
        self._choices[sequence.index].fin = fin

    def on_end(self, cut: str, error: ApiError | None) -> None:
        self._ended, self._cut = self._clock_ns(), cut
        if error is not None:
            self._fail(error)

    def _fail(self, error: ApiError) -> None:
        from opentelemetry.trace import StatusCode

        self._root.set_attributes({"error.type": error.code, "http.response.status_code": error.status})
        self._root.set_status(StatusCode.ERROR, error.message)

    def _make_spans(self) -> None:
        now = self._clock_ns()
        self._stage("validate", "gateway", self._begun, self._validated or now)
        for index, choice in enumerate(self._choices):
            if choice.submitted:
                self._choice_stages(index, choice)
        if self._ended:
            self._stage("respond", "gateway", self._ended, now)
        self._root.set_attributes(
            {
                "gen_ai.usage.output_tokens": sum(choice.tokens for choice in self._choices),
                "gen_ai.response.finish_reasons": [choice.reason or self._cut for choice in self._choices],
                "epicycle.loops": sum(choice.loops for choice in self._choices),
            }
        )
        self._root.end(now)

    def _choice_stages(self, index: int, choice: _Choice) -> None:
        queue, prefill, decode, end = choice.bounds()
        which: Attributes = {"epicycle.choice": index}
        if prefill:
            self._stage("queue", "scheduler", queue, prefill, which)
        if decode > prefill or choice.tokens:
            self._stage("prefill", "executor", prefill, decode, which)
        if choice.tokens:
            did: Attributes = {"epicycle.tokens": choice.tokens, "epicycle.loops": choice.loops}
            self._stage("decode", "executor", decode, end, which | did | {"epicycle.executor": choice.executor})
            busy: Attributes = {"epicycle.busy_ms": round(choice.detokenizer.busy_s * 1e3, 3)}
            self._stage("detokenize", "gateway", choice.first, choice.last, which | busy)

    def _stage(self, name: str, actor: str, begin: int, end: int, attributes: Attributes | None = None) -> None:
        span = self._tracer.start_span(
            f"{actor}.{name}",
            context=self._context,
            start_time=begin,
            attributes={"epicycle.actor": actor, **(attributes or {})},
        )
        span.end(max(begin, end))
