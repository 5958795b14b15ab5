"""Replay against another server than ours: OpenAI's fields only, and every way in which an answer can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.http_target import HttpTarget
from epicycle.tools.replaying.run import run
from tests.fakes.replay import EchoTarget, row
from tests.unit.test_replay_run import OURS, TALK, plan

WORDS = [{"role": "user", "content": "hello"}]


class PlainServer:
    """Streams three words to every chat; `manner` is how it misbehaves."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.manner = ""
        self.never = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}, {"id": "large"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.manner == "refuse":
            return web.Response(status=502, text="<html>bad gateway</html>")
        if self.manner == "redirect":
            raise web.HTTPFound("/elsewhere")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b": comment\n\n" + event(delta={"role": "assistant"}))
        if self.manner == "stall":
            await self.never.wait()
        for word in ("tea", " and", " milk"):
            await answer.write(event(delta={"content": word}))
        if self.manner == "abort":
            assert request.transport is not None
            request.transport.abort()
            return answer
        if self.manner == "error":
            await answer.write(b'data: {"error": {"code": "oops", "message": "sorry"}}\n\n')
        elif self.manner != "cut":
            await answer.write(event(delta={}, finish_reason="stop"))
            await answer.write(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n')
            await answer.write(b"data: [DONE]")  # without its blank line, and in two writes
            await answer.write(b"\n")
        return answer


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[tuple[PlainServer, str]]:
    plain = PlainServer()
    async with TestServer(plain.app()) as running:
        yield plain, str(running.make_url("/")).rstrip("/")
        plain.never.set()


async def replayed(url: str, **options: Any) -> dict[str, Any]:
    rows = [row("a", "s", messages=WORDS), row("b", "s", messages=WORDS, message_mode="delta")]
    async with HttpTarget(url, **options) as target:
        return await run(plan(rows), target)


async def test_it_gets_openais_fields_and_its_words_come_back(server: tuple[PlainServer, str]) -> None:
    plain, url = server
    summary = await replayed(url + "/v1", api_key="secret")
    assert ({"ok": 2}, 6, 18) == (summary["requests"], summary["output_tokens"], summary["prompt_tokens"])
    assert ("plain", None, None) == (summary["target"]["speaks"], summary["mean_loops"], summary["cache_hit_share"])
    assert {"stop": 2} == summary["finish_reasons"]
    first, second = plain.bodies
    assert {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"} == first.keys()
    assert "small" == first["model"]
    assert ["hello", "tea and milk", "hello"] == [message["content"] for message in second["messages"]]
    assert ("Bearer secret", "s") == (plain.headers[0]["Authorization"], plain.headers[0]["X-Session-Affinity"])


@pytest.mark.parametrize(
    ("manner", "code"),
    [("refuse", "http_502"), ("redirect", "http_302"), ("cut", "cut_off"), ("error", "oops"), ("abort", "connection")],
)
async def test_a_bad_answer_is_a_failure_of_its_kind(manner: str, code: str, server: tuple[PlainServer, str]) -> None:
    plain, url = server
    plain.manner = manner
    summary = await replayed(url)
    assert {"failed": 1, "skipped": 1} == summary["requests"]
    assert [code] == list(summary["failures"])
    assert 0 == summary["latency"]["ttft_ms"]["count"]


async def test_an_answer_that_never_ends_fails_at_its_deadline(server: tuple[PlainServer, str]) -> None:
    plain, url = server
    plain.manner = "stall"
    summary = await replayed(url, timeout_s=0.1)
    assert ["timeout"] == list(summary["failures"])


async def test_a_model_can_be_chosen_from_those_that_are_served(server: tuple[PlainServer, str]) -> None:
    _, url = server
    async with HttpTarget(url) as target:
        assert "large" == (await target.facts("large")).model
        with pytest.raises(ReplayError, match="small, large"):
            await target.facts("huge")


async def test_an_interrupted_run_sums_up_what_has_ended() -> None:
    class Slow(EchoTarget):
        async def send(self, *parts: Any) -> None:
            if len(self.bodies) == 3:
                task.cancel()
                await asyncio.Event().wait()
            await super().send(*parts)

    task = asyncio.create_task(run(plan(TALK), Slow(OURS)))
    summary = await task
    assert summary["is_interrupted"]
    assert {"ok": 3} == summary["requests"]
    assert not summary["is_valid"]
