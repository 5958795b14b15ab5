"""`bench --mode http`: bodies, events, counters, and a load against a server of a few lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epicycle.tools.bench_http import HttpError, body_of, extra_fields, measure, parse_counters, take_line
from epicycle.tools.bench_load import BenchRequest, Load, Record
from epicycle.tools.bench_workload import Workload
from tests.fakes.tiny_models import OURO, spec_of

SPEC = spec_of(OURO)
BURST = Workload(
    name="b", model="m", kind="burst", streams=2, requests=2, prompt=9, output=4, context=13, slots=2,
    depths="trace-2.45",
)  # fmt: skip
METRICS = """# HELP epicycle_ticks traversals
epicycle_ticks_total{executor="ex0"} 12.0
epicycle_starved_total{executor="ex0",cause="pool"} 1.0
epicycle_starved_total{executor="ex0",cause="latency"} 2.0
epicycle_other_total 9.0
"""


class LoopedServer:
    """Streams as many events as asked for, `missing` fewer; counts ticks; remembers bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.missing = 0
        self.status = 200

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "loops": 4}]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"epicycle_ticks_total {float(10 * len(self.bodies))}\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        answer = web.StreamResponse()
        await answer.prepare(request)
        depths = body.get("exit_trace") or [4] * body["max_tokens"]
        for number in range(body["max_tokens"] - self.missing):
            choice = {"index": 0, "text": "x", "token_ids": [number + 3], "exit_depths": [depths[number]]}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest.fixture
async def server() -> AsyncIterator[tuple[LoopedServer, str]]:
    looped = LoopedServer()
    async with TestServer(looped.app()) as running:
        yield looped, str(running.make_url("/")).rstrip("/")


async def test_a_load_over_http(server: tuple[LoopedServer, str]) -> None:
    looped, url = server
    load = Load(BURST, SPEC, seed=1)
    result = await measure(url, load, "run 1")
    requests = [load.stream(number) for number in range(2)]
    assert [request.depths for request in requests] == [record.depths for record in result.records]
    assert [[3, 4, 5, 6]] * 2 == [record.tokens for record in result.records]
    assert sorted(request.prompt for request in requests) == sorted(body["prompt"] for body in looped.bodies)  # type: ignore[type-var]
    assert ["run 1"] * 2 == [body["cache_salt"] for body in looped.bodies]
    assert {"ticks": 20.0} == result.counters


async def test_turns_of_a_session_carry_what_the_server_said(server: tuple[LoopedServer, str]) -> None:
    looped, url = server
    talk = Workload(
        name="t", model="m", kind="sessions", sessions=1, turns=2, first_prompt=5, new_tokens=2, output=3, context=32,
        slots=1,
    )  # fmt: skip
    await measure(url, Load(talk, SPEC, seed=1), "run 1")
    first, second = (body["prompt"] for body in looped.bodies)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [*first, 3, 4, 5] == second[:8]


async def test_too_few_tokens_are_an_error(server: tuple[LoopedServer, str]) -> None:
    looped, url = server
    looped.missing = 1
    with pytest.raises(HttpError, match="got 3 token ids of 4"):
        await measure(url, Load(BURST, SPEC, seed=1), "run 1")


async def test_a_refusal_is_an_error_with_its_text(server: tuple[LoopedServer, str]) -> None:
    looped, url = server
    looped.status = 429
    with pytest.raises(HttpError, match=r"HTTP 429.*no room"):
        await measure(url, Load(msgspec.structs.replace(BURST, requests=1, streams=1), SPEC, seed=1), "run 1")


def test_plain_requests_send_no_field_of_ours() -> None:
    body = body_of(BenchRequest(number=0, label="stream", prompt=[5], output=3), {"model": "m"})
    assert not {"exit_trace", "exit_threshold", "cache_salt"} & set(body)
    assert ([5], 3, True, True, "m") == tuple(
        body[name] for name in ("prompt", "max_tokens", "ignore_eos", "stream", "model")
    )


def test_salt_goes_to_servers_that_run_loops_only() -> None:
    assert {"model": "a"} == extra_fields({"id": "a"}, "run 1")
    assert {"model": "a", "cache_salt": "run 1"} == extra_fields({"id": "a", "loops": 4}, "run 1")


def test_lines_without_tokens_change_nothing_and_errors_are_raised() -> None:
    record = Record(label="stream", prompt_tokens=1, submitted_s=0.0)
    for line in (b"\n", b": ping\n", b"data: [DONE]\n", b'data: {"choices":[],"usage":{}}\n'):
        take_line(record, line, 1.0)
    assert [] == record.token_s
    with pytest.raises(HttpError, match="engine_lost"):
        take_line(record, b'data: {"error":{"code":"engine_lost"}}\n', 1.0)


def test_counters_are_summed_over_labels() -> None:
    assert {"ticks": 12.0, "starved": 3.0} == parse_counters(METRICS)
