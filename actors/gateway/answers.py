"""The JSON answer of a request that doesn't stream, and what both answers share: ids, objects, choices.

Owns the pieces collected so far. Meets Sink; must not know HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.logprobs import CompletionLogprobs, chat_entry
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece, Usage
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.tokenizer import ServedTokenizer


@dataclass(frozen=True)
class Envelope:
    """The head that every chunk and answer of one request repeats."""

    id: str
    object: str
    created: int
    model: str


def envelope(spec: Spec, rid: int) -> Envelope:
    """`rid` makes the id unique; nothing else uses it."""
    created = int(time.time())
    if not spec.is_chat:
        return Envelope(f"cmpl-{rid:016x}", "text_completion", created, spec.model_id)
    kind = "chat.completion.chunk" if spec.is_stream else "chat.completion"
    return Envelope(f"chatcmpl-{rid:016x}", kind, created, spec.model_id)


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class AnswerSink:
    """`wait` returns the body once the request has ended well."""

    def __init__(self, spec: Spec, head: Envelope, tokenizer: ServedTokenizer | None) -> None:
        self._spec = spec
        self._head = head
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(spec.choices)]
        self._end: asyncio.Future[Usage] = asyncio.get_running_loop().create_future()

    async def wait(self) -> bytes:
        """The JSON body. Raises ApiError."""
        usage = await self._end
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return msgspec.json.encode({**vars(self._head), "choices": choices, "usage": usage.as_dict()})

    def on_accepted(self) -> None:
        """Nothing to show before the end."""

    def on_piece(self, piece: Piece) -> None:
        choice, spec = self._choices[piece.index], self._spec
        if piece.part is not None:
            choice.prompt_ids = piece.part.prompt.ids
            if spec.echo:
                choice.texts.append(piece.part.prompt.text)
        choice.texts.append(piece.text)
        if piece.token != NO_TOKEN:
            choice.tokens.append(piece.token)
            choice.depths.append(piece.depth)
        if spec.wants_logprobs and not spec.is_chat:
            choice.logprobs.add_piece(self._tokenizer, piece)
        elif piece.logprob is not None:
            choice.entries.append(chat_entry(self._tokenizer, piece.token, piece.logprob))
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

    def on_done(self, usage: Usage) -> None:
        if not self._end.done():
            self._end.set_result(usage)

    def on_failed(self, error: ApiError) -> None:
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # the client may have left before anybody waits

    def flush(self) -> None:
        """Nothing is written before the end."""

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        spec, text = self._spec, "".join(choice.texts)
        fields: dict[str, Any] = {"index": index}
        if spec.is_chat:
            fields["message"] = {"role": "assistant", "content": text}
            fields["logprobs"] = {"content": choice.entries} if spec.wants_logprobs else None
        else:
            fields["text"] = text
            fields["logprobs"] = vars(choice.logprobs) if spec.wants_logprobs else None
        fields["finish_reason"], fields["stop_reason"] = choice.finish_reason, choice.stop_reason
        fields["exit_depths"] = choice.depths
        if spec.returns_token_ids:
            fields["token_ids"], fields["prompt_token_ids"] = choice.tokens, choice.prompt_ids
        return fields
