"""The embeddable clients by their public names: AsyncClient, and Client for programs without an event loop.

Client owns a thread with a loop of its own and an AsyncClient on it, so there is one implementation. Needs neither
torch nor aiohttp.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from epicycle.transport.async_client import (
    CONNECT_TIMEOUT_S,
    HEALTH_TIMEOUT_S,
    TIMEOUT_S,
    AsyncClient,
    Messages,
    Stream,
    ask_health,
)
from epicycle.transport.errors import ClientError
from epicycle.transport.results import Choice, Prompt, Result, StreamEvent
from epicycle.transport.wire.control import HealthReply

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "ClientError",
    "HealthReply",
    "Result",
    "Stream",
    "StreamEvent",
    "SyncStream",
    "ask_health",
]

T = TypeVar("T")


class Client:
    """A blocking client; any thread may call it. Use `with`, or close() at the end.

    Arguments and errors are AsyncClient's.
    """

    def __init__(
        self,
        port: int | None = None,
        run_dir: str | Path | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="epicycle-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(port, run_dir, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, **params: Any) -> Result:
        """As AsyncClient.generate."""
        return self._wait(self._client.generate(prompt, **params))

    def chat(self, messages: Messages, **params: Any) -> Result:
        """As AsyncClient.chat."""
        return self._wait(self._client.chat(messages, **params))

    def stream(self, prompt: Prompt, **params: Any) -> SyncStream:
        """As AsyncClient.stream: an iterator of StreamEvent."""
        return SyncStream(self, self._client.stream(prompt, **params))

    def stream_chat(self, messages: Messages, **params: Any) -> SyncStream:
        """As AsyncClient.stream_chat."""
        return SyncStream(self, self._client.stream_chat(messages, **params))

    def health(self, *, is_deep: bool = False, timeout_s: float = HEALTH_TIMEOUT_S) -> HealthReply:
        """As AsyncClient.health."""
        return self._wait(self._client.health(is_deep=is_deep, timeout_s=timeout_s))

    def close(self) -> None:
        """Cancel what runs, hang up and end the thread. Idempotent; not while another thread waits in a call."""
        if self._is_closed:
            return
        self._wait(self._client.close())
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's loop; its own deadlines bound the wait. An interrupt cancels it."""
        if self._is_closed:
            work.close()
            raise ClientError("closed", "this client is closed", 503)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


class SyncStream(Iterator[StreamEvent]):
    """A Stream for blocking code. `with` cancels what isn't finished at the end of the block."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __next__(self) -> StreamEvent:
        event = self._client._wait(self._next())
        if event is None:
            raise StopIteration
        return event

    def result(self) -> Result:
        """As Stream.result."""
        return self._client._wait(self._stream.result())

    def cancel(self) -> None:
        """As Stream.cancel; a closed client has cancelled already."""
        if not self._client._is_closed:
            self._client._wait(self._cancel())

    async def _next(self) -> StreamEvent | None:
        # A coroutine can't end with StopAsyncIteration across threads.
        return await anext(self._stream, None)

    async def _cancel(self) -> None:
        self._stream.cancel()
