"""A small HTTP client for tests: whole answers, streams as lists of events, and raw sockets for bad manners."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        error = self.json["error"]
        assert {"message", "type", "param", "code"} == set(error)
        return error

    @property
    def choice(self) -> Any:
        assert self.status == 200, self.body
        return self.json["choices"][0]

    @property
    def events(self) -> list[Any]:
        """The JSON events of a stream, [DONE] left out."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]

    @property
    def is_done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def comments(self) -> int:
        return sum(line.startswith(": ") for line in self.body.decode().split("\n\n"))


class Client:
    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(self.base_url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.send("GET", path, headers=headers)

    async def post(self, path: str, **fields: Any) -> Answer:
        return await self.send("POST", path, json=fields)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return await self.post(COMPLETIONS, prompt=prompt, **fields)

    async def chat(self, messages: Any = HELLO, **fields: Any) -> Answer:
        return await self.post(CHAT, messages=messages, **fields)

    async def post_raw(self, path: str, body: bytes, content_type: str = "application/json", **headers: str) -> Answer:
        return await self.send("POST", path, data=body, headers={"Content-Type": content_type, **headers})

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        async with self._session.request(method, path, **options) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def metric(self, name: str) -> float:
        """The value of one series of /metrics, or the sum over the labels of a bare name."""
        text = (await self.get("/metrics")).body.decode()
        ends = (" ",) if "{" in name else (" ", "{")
        lines = [line for line in text.splitlines() if line.startswith(tuple(name + end for end in ends))]
        assert lines, f"no {name} on /metrics"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def dial(self, path: str, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a socket of its own, sent and unread."""
        where = urlsplit(self.base_url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader, writer
