"""Streams against a server under test, and how each of them ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

START_DEADLINE_S = 15.0


@dataclass
class Ending:
    """How one stream went: `terminals` holds every terminal it saw (exactly one is right), `tokens` its output."""

    status: int = 0
    tokens: int = 0
    terminals: list[str] = field(default_factory=list)


class Load:
    """`count` concurrent streams of `tokens` tokens each; entering waits until every one has output."""

    def __init__(self, port: int, count: int, tokens: int = 400) -> None:
        self.endings = [Ending() for _ in range(count)]
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._tokens = tokens
        self._started = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._tasks = [asyncio.create_task(self._stream(n, ending)) for n, ending in enumerate(self.endings)]
        async with asyncio.timeout(START_DEADLINE_S):
            await self._started.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def over(self, timeout_s: float) -> Counter[str]:
        """Wait until every stream has ended; terminals by kind. Raises TimeoutError when one hangs."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)
        assert [1] * len(self.endings) == [len(ending.terminals) for ending in self.endings]
        return Counter(ending.terminals[0] for ending in self.endings)

    async def _stream(self, number: int, ending: Ending) -> None:
        body = {"prompt": f"stream {number}", "max_tokens": self._tokens, "stream": True}
        try:
            async with self._session.post(self._url, json=body) as reply:
                ending.status = reply.status
                if reply.status != 200:
                    ending.terminals.append((await reply.json())["error"]["code"])
                async for line in reply.content:
                    self._take(line, ending)
        except aiohttp.ClientError:
            ending.terminals.append("cut")
        finally:
            self._started.set()

    def _take(self, line: bytes, ending: Ending) -> None:
        if not line.startswith(b"data: "):
            return
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            ending.terminals.append("done")
            return
        event = json.loads(data)
        if "error" in event:
            ending.terminals.append(event["error"]["code"])
            return
        ending.tokens += 1
        if all(other.tokens for other in self.endings):
            self._started.set()


async def ask(port: int, tokens: int = 3) -> int:
    """One short request; its HTTP status, 0 when there was no answer."""
    body = {"prompt": "hello", "max_tokens": tokens}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as reply,
        ):
            await reply.read()
            return reply.status
    except aiohttp.ClientError:
        return 0


async def probe(port: int, path: str = "/health") -> int:
    """The status of a probe, 0 when there was no answer."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as reply:
            return reply.status
    except aiohttp.ClientError:
        return 0
