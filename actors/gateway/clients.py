"""The endpoint of embeddable clients: the HTTP surface over ZeroMQ, through the same validator and generations.

Owns the ROUTER and one task per request. A client that reads too slowly or is gone has its requests cancelled. Meets
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.generation import Generation
from epicycle.actors.gateway.logprobs import CompletionLogprobs, chat_logprobs
from epicycle.actors.gateway.pieces import NO_TOKEN, Piece, Usage
from epicycle.actors.gateway.request_trace import RequestTrace
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.tokenizer import ServedTokenizer
from epicycle.transport.router import Router
from epicycle.transport.wire.base import Wire
from epicycle.transport.wire.client import Abort, Done, Event, Failed, FromClient, Generate
from epicycle.transport.wire.columns import I32, U16, pack

Key = tuple[bytes, int]  # a client's identity and its number for the request


class ClientEndpoint:
    """Made on the running loop; binds at once."""

    def __init__(self, core: Core, path: Path) -> None:
        self._core = core
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._running: dict[Key, Generation] = {}
        self._router = Router(
            path,
            FromClient,
            on_message=self._on_message,
            on_slow=self._on_slow,
            on_gone=self._on_gone,
            peer_limit=core.config.server.slow_client_events,
        )
        self.address = self._router.address

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._router.close()

    def _on_message(self, identity: bytes, message: FromClient) -> None:
        match message:
            case Generate(ref=ref):
                key = (identity, ref)
                if key in self._tasks:
                    text = f"ref {ref} is in use by a request in flight"
                    self._fail(key, ApiError("invalid_request_error", text, "ref"))
                    return
                task = asyncio.get_running_loop().create_task(self._serve(key, message))
                self._tasks[key] = task
                task.add_done_callback(lambda _: self._tasks.pop(key, None))
            case Abort(ref=ref):
                self._cancel((identity, ref))
            case _:
                raise AssertionError(message)

    async def _serve(self, key: Key, message: Generate) -> None:
        headers = {"traceparent": message.traceparent} if message.traceparent else {}
        trace = self._core.trace(f"zmq {message.kind}", headers)
        try:
            with trace or contextlib.nullcontext():
                served = self._core.admit()
                spec = await self._validate(message)
                if trace is not None:
                    trace.validated(spec)
                await self._run(key, spec, served.files.tokenizer, trace)
        except ApiError as error:
            self._core.metrics.rejections[error.code] += 1
            self._fail(key, error)

    async def _run(self, key: Key, spec: Spec, tokenizer: ServedTokenizer | None, trace: RequestTrace | None) -> None:
        sink = ClientSink(self, key, spec, tokenizer)
        generation = self._core.generation(spec, sink, tokenizer, trace)
        self._running[key] = generation
        try:
            await generation.start()
            await sink.ended
        finally:
            del self._running[key]
            generation.close()

    async def _validate(self, message: Generate) -> Spec:
        validator, served = self._core.validator, self._core.admit()
        match message.kind:
            case "completions":
                return await validator.completion(message.body, served)
            case "chat":
                return await validator.chat(message.body, served)
            case _:
                raise ApiError(
                    "invalid_request_error", f"kind is {message.kind!r}, must be completions or chat", "kind"
                )

    def send(self, key: Key, message: Wire, *, is_terminal: bool = False) -> None:
        self._router.send(key[0], message, is_terminal=is_terminal)

    def _fail(self, key: Key, error: ApiError) -> None:
        failed = Failed(key[1], error.status, error.code, error.message, error.param or "")
        self.send(key, failed, is_terminal=True)

    def _cancel(self, key: Key) -> None:
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def _on_slow(self, identity: bytes) -> None:
        limit = self._core.config.server.slow_client_events
        text = f"the client left {limit} events unread (server.slow_client_events)"
        for key, generation in list(self._running.items()):
            if key[0] == identity:
                generation.fail(ApiError("slow_client", text), "slow_client")

    def _on_gone(self, identity: bytes) -> None:
        for key in list(self._tasks):
            if key[0] == identity:
                self._cancel(key)


class ClientSink:
    """Pieces to Events. Meets Sink."""

    def __init__(self, endpoint: ClientEndpoint, key: Key, spec: Spec, tokenizer: ServedTokenizer | None) -> None:
        self._endpoint = endpoint
        self._key = key
        self._spec = spec
        self._tokenizer = tokenizer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_accepted(self) -> None:
        """Clients of this kind wait without a proxy in between."""

    def on_piece(self, piece: Piece) -> None:
        has_token = piece.token != NO_TOKEN
        text, prompt_ids = piece.text, b""
        if piece.part is not None:
            prompt_ids = pack(I32, piece.part.prompt.ids)
            if self._spec.echo:
                text = piece.part.prompt.text + text
        event = Event(
            self._key[1],
            piece.index,
            text,
            pack(I32, [piece.token] if has_token else []),
            pack(U16, [piece.depth] if has_token else []),
            piece.finish_reason or "",
            "" if piece.stop_reason is None else str(piece.stop_reason),
            self._logprobs(piece),
            prompt_ids,
        )
        self._endpoint.send(self._key, event)

    def on_done(self, usage: Usage) -> None:
        done = Done(self._key[1], msgspec.json.encode(usage.as_dict()))
        self._endpoint.send(self._key, done, is_terminal=True)
        self._settle()

    def on_failed(self, error: ApiError) -> None:
        failed = Failed(self._key[1], error.status, error.code, error.message, error.param or "")
        self._endpoint.send(self._key, failed, is_terminal=True)
        self._settle()

    def flush(self) -> None:
        """Every event is a message of its own, sent at once."""

    def _settle(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.ended.set_result(None)

    def _logprobs(self, piece: Piece) -> bytes:
        if not self._spec.wants_logprobs:
            return b""
        if self._spec.is_chat:
            return msgspec.json.encode(chat_logprobs(self._tokenizer, piece))
        lists = CompletionLogprobs()
        lists.add_piece(self._tokenizer, piece)
        return msgspec.json.encode(vars(lists) if lists.tokens else None)
