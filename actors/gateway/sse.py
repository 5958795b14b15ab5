"""Server-sent events: one piece is one event with one JSON encode, one batch of pieces one write.

Owns the bytes not written yet and the transport once it has one; before that (headers wait for the first piece) events
collect. Chunks are framed here and written straight to the transport, so that a token costs no task switch. Meets Sink;
must not know how requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from epicycle.actors.gateway.answers import Envelope
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.logprobs import CompletionLogprobs, chat_logprobs
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece, Usage
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.tokenizer import ServedTokenizer

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = msgspec.json.Encoder().encode


class EventTemplates:
    """The constant bytes of one request's events. An event is prefix, text, and a tail made of few parts."""

    def __init__(self, head: Envelope, spec: Spec, tokenizer: ServedTokenizer | None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._before = b"data: " + _encode(vars(head))[:-1] + b',"choices":[{"index":'
        self._opened: set[int] = set()
        self._prefixes: dict[int, bytes] = {}
        field = b',"delta":{"content":' if spec.is_chat else b',"text":'
        self._field = field
        self._close_text = b"}" if spec.is_chat else b""
        plain = self._close_text + b',"logprobs":null,"finish_reason":null,"exit_depths":['
        self._plain_tail = plain
        self._end = b'}],"usage":null}\n\n' if spec.includes_usage else b"}]}\n\n"
        self._is_lean = not spec.wants_logprobs and not spec.returns_token_ids
        self._lean_end = b"]" + self._end

    def event(self, piece: Piece) -> bytes:
        prefix = self._prefixes.get(piece.index)
        if prefix is not None and self._is_lean and piece.finish_reason is None:
            return b"".join((prefix, _encode(piece.text), self._plain_tail, b"%d" % piece.depth, self._lean_end))
        return self._full(piece)

    def usage(self, head: Envelope, usage: Usage) -> bytes:
        return b"data: " + _encode({**vars(head), "choices": [], "usage": usage.as_dict()}) + b"\n\n"

    def _full(self, piece: Piece) -> bytes:
        """Any piece: the first, which names the role and the prompt, the last, and those with logprobs or ids."""
        spec, is_first = self._spec, piece.part is not None
        text = piece.text
        if piece.part is not None and spec.echo:
            text = piece.part.prompt.text + text
        start = self._before + b"%d" % piece.index
        self._prefixes[piece.index] = start + self._field
        role = b',"delta":{"role":"assistant","content":' if spec.is_chat and is_first else self._field
        parts = [start, role, _encode(text), self._close_text]
        parts += [b',"logprobs":', self._logprobs(piece), b',"finish_reason":', _encode(piece.finish_reason)]
        if piece.finish_reason is not None:
            parts += [b',"stop_reason":', _encode(piece.stop_reason)]
        has_token = piece.token != NO_TOKEN
        parts += [b',"exit_depths":', _encode([piece.depth] if has_token else [])]
        if spec.returns_token_ids:
            parts += [b',"token_ids":', _encode([piece.token] if has_token else [])]
            if piece.part is not None:
                parts += [b',"prompt_token_ids":', _encode(piece.part.prompt.ids)]
        return b"".join((*parts, self._end))

    def _logprobs(self, piece: Piece) -> bytes:
        if not self._spec.wants_logprobs:
            return b"null"
        if self._spec.is_chat:
            return _encode(chat_logprobs(self._tokenizer, piece))
        lists = CompletionLogprobs()
        lists.add_piece(self._tokenizer, piece)
        return _encode(vars(lists) if lists.tokens else None)


class StreamSink:
    """One stream. `opened` is done when headers may go out or must not; `ended` when nothing more will come.

    `on_slow` is called once when the client leaves more than `slow_limit` events unread.
    """

    def __init__(
        self,
        spec: Spec,
        head: Envelope,
        tokenizer: ServedTokenizer | None,
        *,
        slow_limit: int,
        on_slow: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._templates = EventTemplates(head, spec, tokenizer)
        self._head = head
        self._includes_usage = spec.includes_usage
        self._slow_limit = slow_limit
        self._on_slow = on_slow
        self._events: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._is_chunked = False
        self._written_events = 0
        self._written_bytes = 0
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.failure: ApiError | None = None
        self.has_written = False  # since somebody last looked; for keep-alive

    def attach(self, transport: asyncio.Transport, *, is_chunked: bool) -> None:
        """Headers are out: write from now on. What has collected goes first."""
        self._transport = transport
        self._is_chunked = is_chunked
        self.flush()

    def take(self) -> bytes:
        """What has collected so far, to go out with the headers."""
        events, self._events = self._events, []
        return b"".join(events)

    def ping(self) -> None:
        """A comment that keeps proxies from closing an idle stream."""
        self._write([PING])

    def on_accepted(self) -> None:
        _settle(self.accepted)

    def on_piece(self, piece: Piece) -> None:
        self._events.append(self._templates.event(piece))

    def on_done(self, usage: Usage) -> None:
        if self._includes_usage:
            self._events.append(self._templates.usage(self._head, usage))
        self._events.append(DONE)
        _settle(self.ended)

    def on_failed(self, error: ApiError) -> None:
        """Before headers the caller answers with a status; behind them this event is the end, without [DONE]."""
        self.failure = error
        self._events.append(b"data: " + error.body() + b"\n\n")
        _settle(self.ended)

    def flush(self) -> None:
        if self._events:
            _settle(self.opened)
            if self._transport is not None:
                events, self._events = self._events, []
                self._write(events)

    def _write(self, events: list[bytes]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = b"".join(events)
        self.has_written = True
        self._written_events += len(events)
        self._written_bytes += len(data)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        unread_bytes = transport.get_write_buffer_size()
        if unread_bytes * self._written_events > self._slow_limit * self._written_bytes and not self.ended.done():
            self._on_slow()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
