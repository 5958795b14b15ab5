"""The embeddable client for asyncio: generate, chat, stream, cancel and health of a running server, without HTTP.

Finds the server through its run directory and speaks to a gateway over ZeroMQ. Owns one connection, multiplexed by
request number; needs neither torch nor aiohttp. Every request has a deadline, and a gateway that goes away fails what
was in flight with `engine_lost`: nothing is asked twice behind the caller's back.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from epicycle.transport.dealer import Dealer
from epicycle.transport.errors import AddressError, ClientError, LinkFull, RunDirError, WireError
from epicycle.transport.outbox import AsyncOutbox, Outbox
from epicycle.transport.results import Collector, Prompt, Result, StreamEvent, stream_event
from epicycle.transport.rundir import Instance, find_instance
from epicycle.transport.wire.client import Abort, Done, Event, Failed, Generate, ToClient
from epicycle.transport.wire.control import HealthQuery, HealthReply

TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 5.0
DIAL_S = 1.0  # then the published address is read again
RESOLVE_RETRY_S = 0.02
OUTBOX_MESSAGES = 4096
UNREAD_EVENTS = 65536

Messages = Sequence[Mapping[str, Any]]


class Stream:
    """The events of one request, as an async iterator that starts it; made by AsyncClient.

    `async with` (or letting go of the stream) cancels what isn't finished. Iteration raises ClientError when the
    request fails.
    """

    def __init__(self, client: AsyncClient, request: Generate) -> None:
        self.ref = request.ref
        self._client = client
        self._request = request
        self._arrived: deque[ToClient] = deque()
        self._wake = asyncio.Event()
        self._collector = Collector()
        self._usage: dict[str, Any] = {}
        self._is_started = False
        self._is_ended = False
        self._is_cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._is_ended:
            raise StopAsyncIteration
        if not self._is_started:
            self._is_started = True
            await self._begin()
        while not self._arrived:
            if self._is_cancelled:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._take(self._arrived.popleft())

    async def result(self) -> Result:
        """Read to the end; the whole answer, events read before included."""
        async for _ in self:
            pass
        return self._collector.result(self._usage, self._is_cancelled)

    def cancel(self) -> None:
        """Stop the request at the server; the iteration ends. Idempotent, and harmless after the end."""
        if not self._is_ended:
            self._is_cancelled = True
            self._client._cancel(self)
            self._end()
            self._wake.set()

    async def _begin(self) -> None:
        try:
            await self._client._start(self, self._request)
        except BaseException:
            self._is_ended = True  # nothing will ever arrive
            raise

    def _put(self, message: ToClient) -> None:
        self._arrived.append(message)
        self._wake.set()

    def _end(self) -> None:
        self._is_ended = True
        self._client._finish(self.ref)

    def _take(self, message: ToClient) -> StreamEvent:
        match message:
            case Event():
                event = stream_event(message)
                self._collector.add(event)
                return event
            case Done(usage=usage):
                self._usage = msgspec.json.decode(usage) if usage else {}
                self._end()
                raise StopAsyncIteration
            case Failed(status=status, code=code, message=text, param=param):
                self._end()
                raise ClientError(code, text, status, param)
            case _:
                raise AssertionError(message)


class AsyncClient:
    """A client on the running loop; all calls from that loop. Use `async with`, or close() at the end.

    `port` and `run_dir` choose the server; by default the only one that runs. Keyword parameters of a request are the
    fields of the HTTP body (max_tokens, temperature, min_loops, exit_threshold, ...), and `traceparent`, HTTP's header.
    """

    def __init__(
        self,
        port: int | None = None,
        run_dir: str | Path | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._port = port
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._aborted: set[int] = set()
        self._dead: set[str] = set()  # addresses of gateways that went away; a path is never bound twice
        self._outbox = AsyncOutbox(Outbox("client", OUTBOX_MESSAGES))
        self._dealer: Dealer | None = None
        self._connecting = asyncio.Lock()
        self._refs = itertools.count(1)
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, prompt: Prompt, **params: Any) -> Result:
        """Complete a prompt (text, ids, or a list of either). Raises ClientError."""
        return await self._run(self.stream(prompt, **params))

    async def chat(self, messages: Messages, **params: Any) -> Result:
        """Answer a conversation. Raises ClientError."""
        return await self._run(self.stream_chat(messages, **params))

    def stream(self, prompt: Prompt, **params: Any) -> Stream:
        """As generate, event by event; nothing is sent before the first one is awaited."""
        return self._stream("completions", {"prompt": prompt, **params})

    def stream_chat(self, messages: Messages, **params: Any) -> Stream:
        """As chat, event by event."""
        return self._stream("chat", {"messages": messages, **params})

    async def health(self, *, is_deep: bool = False, timeout_s: float = HEALTH_TIMEOUT_S) -> HealthReply:
        """The supervisor's view; works while the gateways don't. Raises ClientError."""
        address = (await self._find()).endpoints.get("supervisor", "")
        if not address:
            raise ClientError("not_ready", "the server publishes no supervisor endpoint yet", 503)
        return await ask_health(address, is_deep=is_deep, timeout_s=timeout_s)

    async def close(self) -> None:
        """Cancel what runs and hang up. Idempotent."""
        self._is_closed = True
        for stream in list(self._streams.values()):
            stream.cancel()
        self._hang_up()

    async def _run(self, stream: Stream) -> Result:
        async with stream:
            return await stream.result()

    def _stream(self, kind: str, body: dict[str, Any]) -> Stream:
        traceparent = body.pop("traceparent", "")
        return Stream(self, Generate(next(self._refs), kind, msgspec.json.encode(body), traceparent))

    async def _find(self) -> Instance:
        try:
            return await asyncio.to_thread(find_instance, self._port, self._run_dir)
        except RunDirError as error:
            raise ClientError("unreachable", str(error), 503) from error

    async def _start(self, stream: Stream, request: Generate) -> None:
        """Send the request; from here on the stream gets exactly one terminal."""
        await self._connect()
        if stream._is_ended:  # cancelled meanwhile
            return
        try:
            self._outbox.push(request)
        except WireError as error:
            raise ClientError("request_too_large", str(error), 413) from error
        except LinkFull as error:
            raise ClientError("overloaded", str(error), 429) from error
        self._streams[stream.ref] = stream
        loop = asyncio.get_running_loop()
        self._timers[stream.ref] = loop.call_later(self._timeout_s, self._expire, stream.ref)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._is_closed:
                raise ClientError("closed", "this client is closed", 503)
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    while self._dealer is None:
                        await self._dial(await self._resolve())
            except AddressError as error:
                raise ClientError("unreachable", str(error), 503) from error
            except TimeoutError:
                text = f"no gateway answers after {self._connect_timeout_s:g} s (connect_timeout_s)"
                raise ClientError("not_ready", text, 503) from None

    async def _resolve(self) -> str:
        """The address of a gateway that hasn't been lost; waits for a restarted one to be published."""
        while True:
            endpoints = (await self._find()).endpoints
            fresh = [address for name, address in endpoints.items() if name.endswith(".client")]
            fresh = [address for address in fresh if address not in self._dead]
            if fresh:
                return random.choice(fresh)
            await asyncio.sleep(RESOLVE_RETRY_S)

    async def _dial(self, address: str) -> None:
        """Adopt the connection if the gateway answers soon; else leave it to the next try."""
        dealer = Dealer(address, ToClient, on_message=self._receive, on_lost=lambda: self._lose(address))
        is_adopted = False
        try:
            if await dealer.wait_connected(DIAL_S):
                self._dealer = dealer
                self._outbox.connect(dealer)
                is_adopted = True
        finally:
            if not is_adopted:
                dealer.close()

    def _receive(self, message: ToClient) -> None:
        stream = self._streams.get(message.ref)
        is_event = isinstance(message, Event)
        if stream is None:
            if is_event:
                self._abort(message.ref)  # its reader was dropped without a cancel
            else:
                self._aborted.discard(message.ref)
            return
        if is_event and len(stream._arrived) >= UNREAD_EVENTS:
            self._abort(message.ref)
            message = Failed(message.ref, 503, "slow_client", f"{UNREAD_EVENTS} events were left unread")
        self._put(stream, message)

    def _put(self, stream: Stream, message: ToClient) -> None:
        if not isinstance(message, Event):
            self._finish(stream.ref)
        stream._put(message)

    def _finish(self, ref: int) -> None:
        """Nothing more is expected for `ref`."""
        self._streams.pop(ref, None)
        timer = self._timers.pop(ref, None)
        if timer is not None:
            timer.cancel()

    def _cancel(self, stream: Stream) -> None:
        if stream.ref in self._streams:
            self._abort(stream.ref)

    def _abort(self, ref: int) -> None:
        if self._dealer is None or ref in self._aborted:
            return
        self._aborted.add(ref)
        try:
            self._outbox.push(Abort(ref))
        except LinkFull:
            self._aborted.discard(ref)  # the next event of it tries again

    def _expire(self, ref: int) -> None:
        self._timers.pop(ref, None)
        self._abort(ref)
        stream = self._streams.get(ref)
        if stream is not None:
            self._put(stream, Failed(ref, 504, "timeout", f"no end after {self._timeout_s:g} s (timeout_s)"))

    def _lose(self, address: str) -> None:
        self._dead.add(address)
        if self._dealer is None:  # lost while dialling
            return
        self._hang_up()
        for stream in list(self._streams.values()):
            self._put(stream, Failed(stream.ref, 503, "engine_lost", "the gateway went away"))

    def _hang_up(self) -> None:
        self._outbox.disconnect()
        self._dealer = None
        self._aborted.clear()


async def ask_health(address: str, *, is_deep: bool = False, timeout_s: float = HEALTH_TIMEOUT_S) -> HealthReply:
    """Ask the supervisor at `address`. Raises ClientError after `timeout_s` or when it goes away."""
    answer: asyncio.Future[HealthReply] = asyncio.get_running_loop().create_future()

    def on_message(reply: HealthReply) -> None:
        if not answer.done():
            answer.set_result(reply)

    def on_lost() -> None:
        if not answer.done():
            answer.set_exception(ClientError("unreachable", f"the supervisor at {address} went away", 503))

    dealer = Dealer(address, HealthReply, on_message=on_message, on_lost=on_lost)
    outbox = AsyncOutbox(Outbox("health", 1))
    try:
        outbox.connect(dealer)
        outbox.push(HealthQuery(1, is_deep))
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        raise ClientError("timeout", f"the supervisor at {address} didn't answer within {timeout_s:g} s", 504) from None
    finally:
        outbox.disconnect()
