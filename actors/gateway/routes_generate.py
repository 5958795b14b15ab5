"""POST /v1/completions and /v1/chat/completions: body in, answer or stream out.

Headers of a stream wait for the first token, so that early failures keep their HTTP status; the wait is bounded from
the moment a sequence has a slot. Must not know how a request runs (generation) or what an event looks like (sse).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace

from aiohttp import HttpVersion11, web

from epicycle.actors.gateway.answers import AnswerSink, envelope
from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.generation import Generation
from epicycle.actors.gateway.ranges import LABEL_LIMIT
from epicycle.actors.gateway.reading import read_json_body
from epicycle.actors.gateway.request_trace import RequestTrace
from epicycle.actors.gateway.served import Served
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.sse import PING, StreamSink

Validate = Callable[[bytes, Served], Awaitable[Spec]]
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
CONVERSATION_HEADER = "X-Session-Affinity"
LAST_WRITE_S = 30.0  # a client that reads nothing may hold its connection this long after the end


def add_routes(router: web.UrlDispatcher, core: Core) -> None:
    async def completions(request: web.Request) -> web.StreamResponse:
        return await _generate(request, core, core.validator.completion)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _generate(request, core, core.validator.chat)

    router.add_post("/v1/completions", completions)
    router.add_post("/v1/chat/completions", chat)


async def _generate(request: web.Request, core: Core, validate: Validate) -> web.StreamResponse:
    trace = core.trace(f"POST {request.path}", request.headers)
    with trace or nullcontext():
        served, spec = await _validated(request, core, validate)
        if trace is not None:
            trace.validated(spec)
        return await (_stream if spec.is_stream else _answer)(request, core, served, spec, trace)


async def _validated(request: web.Request, core: Core, validate: Validate) -> tuple[Served, Spec]:
    """Raises ApiError for what is refused before it begins."""
    try:
        served = core.admit()
        content = await read_json_body(request, core.config.server)
        return served, _named(await validate(content, served), request)
    except ApiError as error:
        core.metrics.rejections[error.code] += 1
        raise


def _named(spec: Spec, request: web.Request) -> Spec:
    """A recording takes the header for a session where the body names none."""
    header = request.headers.get(CONVERSATION_HEADER, "")[:LABEL_LIMIT]
    return replace(spec, conversation=header) if header and not spec.conversation else spec


async def _answer(
    request: web.Request, core: Core, served: Served, spec: Spec, trace: RequestTrace | None
) -> web.StreamResponse:
    tokenizer = served.files.tokenizer
    sink = AnswerSink(spec, envelope(spec, core.table.new_rid()), tokenizer)
    generation = core.generation(spec, sink, tokenizer, trace)
    try:
        await generation.start()
        body = await sink.wait()
    finally:
        generation.close()
    return web.Response(body=body, content_type="application/json")


async def _stream(
    request: web.Request, core: Core, served: Served, spec: Spec, trace: RequestTrace | None
) -> web.StreamResponse:
    server, tokenizer = core.config.server, served.files.tokenizer
    head = envelope(spec, core.table.new_rid())
    limit = server.slow_client_events
    sink = StreamSink(spec, head, tokenizer, slow_limit=limit, on_slow=lambda: _cut_off(request, generation, limit))
    generation = core.generation(spec, sink, tokenizer, trace)
    try:
        await generation.start()
        await _wait_for_headers(sink, server.header_wait_s)
        response = await _send_headers(request, sink)
        await _keep_alive(sink, server.keepalive_s)
    finally:
        generation.close()
    await _end(request, response)
    return response


async def _wait_for_headers(sink: StreamSink, header_wait_s: float) -> None:
    """Until the first piece, or `header_wait_s` after a slot was given. Raises ApiError for an early failure."""
    await asyncio.wait((sink.accepted, sink.opened), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((sink.opened,), timeout=header_wait_s)
    if sink.failure is not None:
        raise sink.failure


async def _send_headers(request: web.Request, sink: StreamSink) -> web.StreamResponse:
    """Headers, with what has collected or a comment; from here on the sink writes past aiohttp."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(sink.take() or PING)
    if request.transport is not None:
        sink.attach(request.transport, is_chunked=response.chunked)
    return response


async def _keep_alive(sink: StreamSink, interval_s: float) -> None:
    """Until the end, with a comment whenever nothing was written for an interval (0: never)."""
    while True:
        sink.has_written = False
        done, _ = await asyncio.wait((sink.ended,), timeout=interval_s or None)
        if done:
            return
        if not sink.has_written:
            sink.ping()


async def _end(request: web.Request, response: web.StreamResponse) -> None:
    """The last chunk. A client that doesn't take it loses its connection."""
    try:
        async with asyncio.timeout(LAST_WRITE_S):
            await response.write_eof()
    except TimeoutError:
        _abort(request)


def _cut_off(request: web.Request, generation: Generation, limit: int) -> None:
    """The client doesn't read: end the request, and the connection whose bytes nobody takes."""
    text = f"the client left more than {limit} events unread (server.slow_client_events)"
    generation.fail(ApiError("slow_client", text), "slow_client")
    _abort(request)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
