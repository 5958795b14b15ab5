"""HTTP calls of the live suite and what they answered, streams folded into the same shape as plain answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp


@dataclass
class Choice:
    """One sequence as the client was told of it; floats are compared bit for bit."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, told: dict[str, Any]) -> None:
        message = told.get("message") or told.get("delta") or {}
        self.text += told.get("text") or message.get("content") or ""
        self.token_ids += told.get("token_ids") or []
        self.prompt_token_ids += told.get("prompt_token_ids") or []
        self.exit_depths += told["exit_depths"]
        self.finish_reason = told["finish_reason"] or self.finish_reason
        logprobs = told["logprobs"] or {}
        self.logprobs += logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
        self.top_logprobs += logprobs.get("top_logprobs") or []


@dataclass
class Answer:
    """`error` is the error body's content; `terminals` counts [DONE] and error events of a stream."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    terminals: int = 0

    @property
    def choice(self) -> Choice:
        (only,) = self.choices
        return only

    def add(self, told: dict[str, Any]) -> None:
        for choice in told["choices"]:
            while len(self.choices) <= choice["index"]:
                self.choices.append(Choice())
            self.choices[choice["index"]].add(choice)
        self.usage = told.get("usage") or self.usage


@dataclass(frozen=True)
class Running:
    """A stream under way: `answer` grows as events arrive, `task` ends with it."""

    answer: Answer
    task: asyncio.Task[Answer]

    @property
    def tokens(self) -> int:
        return len(self.answer.choices[0].token_ids) if self.answer.choices else 0

    async def leave(self) -> None:
        """Hang up, whatever is still to come."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Calls:
    """One HTTP session with as many connections as there are calls."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None)
        self.session = aiohttp.ClientSession(self._base_url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def complete(self, **body: Any) -> Answer:
        return await self._ask("/v1/completions", body)

    async def chat(self, said: str | list[dict[str, str]], **body: Any) -> Answer:
        """`said`: what the user says, or the messages so far."""
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return await self._ask("/v1/chat/completions", {"messages": messages, **body})

    def start(self, **body: Any) -> Running:
        """A completion stream that is read in the background."""
        answer = Answer(0)
        ask = self._ask("/v1/completions", {**body, "stream": True}, answer)
        return Running(answer, asyncio.create_task(ask))

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.session.post(path, json=body) as reply:
            assert 200 == reply.status, await reply.text()
            return await reply.json()

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(path) as reply:
            return await reply.json()

    async def events(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a completion stream as they come, [DONE] left out."""
        async with self.session.post("/v1/completions", json={**body, "stream": True}) as reply:
            assert 200 == reply.status, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def _ask(self, path: str, body: dict[str, Any], answer: Answer | None = None) -> Answer:
        answer = answer or Answer(0)
        async with self.session.post(path, json={"return_token_ids": True, **body}) as reply:
            answer.status = reply.status
            if reply.status != 200:
                answer.error = (await reply.json())["error"]
            elif not body.get("stream"):
                answer.add(await reply.json())
            else:
                await _read_stream(reply, answer)
            return answer


async def _read_stream(reply: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in reply.content:
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: "):
            continue
        if data == b"[DONE]":
            answer.terminals += 1
            continue
        told = json.loads(data)
        if "error" in told:
            answer.error = told["error"]
            answer.terminals += 1
        else:
            answer.add(told)
