"""One sequence at the executor as the gateway follows it: tokens by index in, pieces out.

Owns its detokenizer, its stop search and its counts. The executor judges stop ids and limits; the gateway expects the
same end, and holds that token's piece back until the Fin so that the finish reason comes with it. Stop strings are
judged here. Must not know HTTP or links.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from epicycle.actors.gateway.pieces import LOGPROB_FLOOR, NO_TOKEN, Piece, PromptPart, TokenLogprob
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.stops import StopScanner
from epicycle.actors.gateway.text import Detokenizer, DetokenizerClock, make_detokenizer
from epicycle.actors.gateway.tokenizer import ServedTokenizer
from epicycle.transport.wire.output import Fin, PromptLogprobs
from epicycle.transport.wire.request import Rejected


class Owner(Protocol):
    """The generation a sequence belongs to."""

    def on_piece(self, sequence: Sequence, piece: Piece) -> None: ...

    def on_stop_string(self, sequence: Sequence) -> None:
        """The sequence has ended here; the executor doesn't know yet."""

    def on_first_token(self) -> None: ...

    def on_token_gap(self, gap_s: float) -> None: ...

    def on_accepted(self, sequence: Sequence) -> None: ...

    def on_rejected(self, sequence: Sequence, rejected: Rejected) -> None: ...

    def on_fin(self, sequence: Sequence, fin: Fin) -> None: ...

    def on_lost(self, sequence: Sequence, code: str, message: str) -> None: ...

    def flush(self) -> None: ...


class Sequence:
    """An entry of the table. `count` tokens and `loops` loops so far; `cached_tokens` of its prompt were cached.

    `executor_epoch` names the executor it runs on; 0 while that isn't known here.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_last_s",
        "_max_tokens",
        "_min_tokens",
        "_offset",
        "_part",
        "_scanner",
        "_stop_ids",
        "cached_tokens",
        "count",
        "executor_epoch",
        "index",
        "is_over",
        "loops",
        "owner",
        "rid",
        "spec",
    )

    def __init__(self, rid: int, index: int, spec: Spec, tokenizer: ServedTokenizer | None, owner: Owner) -> None:
        prompt_number = index // spec.n
        prompt = spec.prompts[prompt_number]
        sampling = spec.samplings[prompt_number]
        self.rid = rid
        self.index = index
        self.spec = spec
        self.owner = owner
        self.count = 0
        self.loops = 0
        self.cached_tokens = 0
        self.executor_epoch = 0
        self.is_over = False
        self._detokenizer: Detokenizer = make_detokenizer(tokenizer, skip_special_tokens=spec.skips_special_tokens)
        self._scanner = StopScanner(spec.stops) if spec.stops.stops else None
        self._stop_ids = spec.stop_ids
        self._min_tokens = sampling.min_tokens
        self._max_tokens = sampling.max_tokens
        self._offset = len(prompt.text) if spec.echo else 0
        self._held: Piece | None = None
        self._part: PromptPart | None = PromptPart(prompt)
        self._last_s = 0.0
        if spec.echo and spec.wants_logprobs:
            self._part = PromptPart(prompt, [TokenLogprob(None, [])])

    def time_detokenizer(self) -> DetokenizerClock:
        """Measure detokenizing from now on."""
        self._detokenizer = clock = DetokenizerClock(self._detokenizer)
        return clock

    def accept(
        self, first_index: int, tokens: Seq[int], depths: Seq[int], logprobs: Seq[TokenLogprob] | None, now_s: float
    ) -> int:
        """Take the tokens that are new; returns how many were not (repeated, or behind the end)."""
        skipped = self.count - first_index
        if skipped < 0:
            text = f"tokens {self.count} to {first_index - 1} of choice {self.index} never arrived"
            self.owner.on_lost(self, "server_error", text)
            return len(tokens)
        if skipped < len(tokens):
            self._note_time(now_s)
        for at in range(skipped, len(tokens)):
            self._add(tokens[at], depths[at], logprobs[at] if logprobs is not None else None)
            if self.is_over:
                return len(tokens) - at - 1 + skipped
        return min(skipped, len(tokens))

    def accept_prompt_logprobs(self, message: PromptLogprobs, logprobs: list[TokenLogprob]) -> None:
        """Logprobs of prompt tokens; repeated ones drop by index."""
        if self._part is None or not self._part.logprobs:
            return
        have = self._part.logprobs
        have.extend(logprobs[max(0, len(have) - message.first) :])

    def finish(self, reason: str) -> None:
        """The executor has ended it well, with `reason` stop or length."""
        tail = self._detokenizer.flush()
        piece = self._held or Piece(self.index, "", NO_TOKEN, 0, self._offset)
        self._held = None
        found = None
        if self._scanner is not None:
            tail, found = self._scanner.push(tail)
            tail += self._scanner.flush() if found is None else ""
        piece.text += tail
        piece.finish_reason = "stop" if found is not None else reason
        if found is not None:
            piece.stop_reason = found
        elif reason == "stop" and piece.token in self.spec.named_stop_ids:
            piece.stop_reason = piece.token
        self.is_over = True
        self._emit(piece)

    def _note_time(self, now_s: float) -> None:
        if self.count:
            self.owner.on_token_gap(now_s - self._last_s)
        else:
            self.owner.on_first_token()
        self._last_s = now_s

    def _add(self, token: int, depth: int, logprob: TokenLogprob | None) -> None:
        if self._held is not None:  # the executor went on where we expected the end
            held, self._held = self._held, None
            self._emit(held)
        self.count += 1
        self.loops += depth
        piece = Piece(self.index, "", token, depth, self._offset, logprob)
        if token in self._stop_ids and self.count >= self._min_tokens:
            self._held = piece  # its text is no part of the answer
            return
        text = self._detokenizer.push(token)
        self._offset += len(text)
        found = None
        if self._scanner is not None:
            text, found = self._scanner.push(text)
        piece.text = text
        if found is not None:
            piece.finish_reason, piece.stop_reason = "stop", found
            self.is_over = True
            self._emit(piece)
            self.owner.on_stop_string(self)
        elif self.count == self._max_tokens:
            self._held = piece
        else:
            self._emit(piece)

    def _emit(self, piece: Piece) -> None:
        if self._part is not None:
            piece.part, self._part = self._part, None
        self.owner.on_piece(self, piece)


def token_logprobs(k: int, logprobs: Seq[float], top_ids: Seq[int], top_logprobs: Seq[float]) -> list[TokenLogprob]:
    """One row's columns as values: `k` alternatives a token, everything above the floor (JSON has no -inf)."""
    return [
        TokenLogprob(
            max(logprob, LOGPROB_FLOOR),
            [
                (top_id, max(top, LOGPROB_FLOOR))
                for top_id, top in zip(top_ids[at * k : at * k + k], top_logprobs[at * k : at * k + k], strict=True)
            ],
        )
        for at, logprob in enumerate(logprobs)
    ]
