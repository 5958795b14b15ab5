"""OpenTelemetry traces: a span per stage of every choice, inside the client's own trace, and none unless asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from epicycle.actors.gateway.telemetry import Telemetry, make_provider, traces_url
from epicycle.transport.config import ConfigError, OtelConfig, load
from epicycle.transport.dealer import Dealer
from epicycle.transport.wire.client import Abort, Generate, ToClient
from tests.e2e.client import HELLO, Client
from tests.fakes.stack import MOCK, UNLIMITED, Stack, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ["gateway.validate", "scheduler.queue", "executor.prefill", "executor.decode", "gateway.detokenize"]


@dataclass
class Traced:
    """A server whose spans stay in memory."""

    stack: Stack
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def by_name(self, **attributes: object) -> dict[str, ReadableSpan]:
        told = {name.replace("_", "."): value for name, value in attributes.items()}
        return {span.name: span for span in self.spans() if told.items() <= dict(span.attributes or {}).items()}


@pytest.fixture
async def traced(stack: Stack) -> Traced:
    return trace_in_memory(stack)


def trace_in_memory(stack: Stack) -> Traced:
    one = Traced(stack)
    provider = make_provider(OtelConfig(), "gw0", SimpleSpanProcessor(one.exporter))
    stack.gateway.core.telemetry = Telemetry(provider)
    return one


async def test_every_stage_of_a_request_is_a_span_in_the_clients_trace(traced: Traced) -> None:
    async with Client(traced.stack.base_url) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True}
        answer = await client.send("POST", "/v1/chat/completions", json=body, headers=headers)
    spans = traced.by_name()
    root = spans.pop("POST /v1/chat/completions")

    assert root.parent is not None and root.context is not None
    assert (TRACE, PARENT) == (format_trace_id(root.context.trace_id), format_span_id(root.parent.span_id))
    assert root.kind == SpanKind.SERVER
    assert {*STAGES, "gateway.respond"} == set(spans)
    for span in spans.values():
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert span.resource.attributes["service.instance.id"] == "gw0"
    told: Any = root.attributes
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == told["gen_ai.usage.input_tokens"]
    assert (5, usage["loops"]) == (told["gen_ai.usage.output_tokens"], told["epicycle.loops"])
    assert ("chat", "ouro-tiny", ("length",)) == (
        told["gen_ai.operation.name"],
        told["gen_ai.request.model"],
        told["gen_ai.response.finish_reasons"],
    )


@pytest.fixture
async def reachable(short_dir: Path) -> AsyncIterator[Traced]:
    """A server that ZeroMQ clients find too."""
    async with Stack(msgspec.structs.replace(MOCK, run_dir=str(short_dir))) as stack:
        yield trace_in_memory(stack)


@pytest.fixture
async def dealer(reachable: Traced) -> AsyncIterator[Dealer]:
    address = next(end.address for end in reachable.stack.gateway_host.endpoints if end.link == "client")
    made = Dealer(address, ToClient, on_message=lambda _: None, on_lost=lambda: None)
    assert await made.wait_connected(5)
    yield made
    made.close()
    await asyncio.sleep(0)


async def test_zeromq_clients_are_traced_alike(reachable: Traced, dealer: Dealer) -> None:
    body = msgspec.json.encode({"prompt": "a", "max_tokens": 2})
    dealer.send(Generate(1, "completions", body, f"00-{TRACE}-{PARENT}-01"))
    await until(lambda: "zmq completions" in reachable.by_name())
    root = reachable.by_name()["zmq completions"]

    assert root.context is not None and TRACE == format_trace_id(root.context.trace_id)
    assert {*STAGES, "gateway.respond", "zmq completions"} == set(reachable.by_name())


async def test_an_aborted_zeromq_request_is_told_as_cancelled(reachable: Traced, dealer: Dealer) -> None:
    reachable.stack.allow(6)
    dealer.send(Generate(1, "completions", b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true}'))
    await reachable.stack.until_resident(1)
    await until(lambda: reachable.stack.ticks_left == 0)
    dealer.send(Abort(1))
    await until(lambda: "zmq completions" in reachable.by_name())
    reachable.stack.allow(UNLIMITED)
    told: Any = reachable.by_name()["zmq completions"].attributes

    assert ("cancelled",) == told["gen_ai.response.finish_reasons"]
    assert 0 < told["gen_ai.usage.output_tokens"] < 900


async def test_stages_of_a_choice_lie_end_to_end_and_inside_the_request(traced: Traced) -> None:
    async with Client(traced.stack.base_url) as client:
        await client.complete(max_tokens=3, n=2, stream=True)
    root = traced.by_name()["POST /v1/completions"]
    assert root.start_time is not None and root.end_time is not None
    for choice in (0, 1):
        spans = traced.by_name(epicycle_choice=choice)
        queue, prefill, decode = (spans[name] for name in STAGES[1:4])
        assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
        assert queue.start_time is not None and decode.end_time is not None
        assert root.start_time <= queue.start_time <= decode.end_time <= root.end_time
        did: Any = decode.attributes
        assert (3, "ex0") == (did["epicycle.tokens"], did["epicycle.executor"])


async def test_a_refusal_is_an_error_span_without_stages_behind_it(traced: Traced) -> None:
    async with Client(traced.stack.base_url) as client:
        await client.complete(max_tokens=-1)
    spans = traced.by_name()
    root = spans["POST /v1/completions"]

    assert {"POST /v1/completions", "gateway.validate"} == set(spans)
    assert root.status.status_code == StatusCode.ERROR and "max_tokens" in (root.status.description or "")
    told: Any = root.attributes
    assert ("invalid_request_error", 400) == (told["error.type"], told["http.response.status_code"])


async def test_a_client_that_leaves_still_has_its_stages(traced: Traced) -> None:
    stack = traced.stack
    async with Client(stack.base_url) as client:
        stack.allow(6)
        _, writer = await client.dial("/v1/completions", {"prompt": "a", "max_tokens": 900, "ignore_eos": True})
        await stack.until_resident(1)
        await until(lambda: stack.ticks_left == 0)
        writer.close()
        await until(lambda: "POST /v1/completions" in traced.by_name())
        stack.allow(UNLIMITED)
    spans = traced.by_name()

    assert set(STAGES) <= set(spans)
    told: Any = spans["POST /v1/completions"].attributes
    assert ("cancelled",) == told["gen_ai.response.finish_reasons"]


async def test_what_is_not_sampled_leaves_no_span(traced: Traced) -> None:
    async with Client(traced.stack.base_url) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        answer = await client.send("POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
    assert (200, []) == (answer.status, traced.spans())


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, asyncio.Queue[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP collector: its address, and what it was sent."""
    sent: asyncio.Queue[ExportTraceServiceRequest] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        assert "secret" == request.headers["x-key"]
        sent.put_nowait(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", sent
    await runner.cleanup()


async def test_spans_reach_a_collector(
    collector: tuple[str, asyncio.Queue[ExportTraceServiceRequest]],
) -> None:
    address, sent = collector
    otel = OtelConfig(endpoint=address, headers=["x-key=secret"], service_name="loops")
    async with Stack(msgspec.structs.replace(MOCK, otel=otel)) as stack, Client(stack.base_url) as client:
        assert 200 == (await client.complete(max_tokens=2)).status
    (resource,) = (await sent.get()).resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}

    assert {*STAGES, "gateway.respond", "POST /v1/completions"} == names
    assert "loops" in {attribute.value.string_value for attribute in resource.resource.attributes}


async def test_a_server_that_does_not_trace_loads_nothing() -> None:
    code = "import sys, epicycle.actors.gateway.app; print('opentelemetry' in sys.modules)"
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "False\n" == ended.stdout


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_a_base_address_gets_the_path_of_traces(endpoint: str, url: str) -> None:
    assert url == traces_url(endpoint)


@pytest.mark.parametrize(
    ("field", "value"), [("endpoint", "localhost:4318"), ("headers", ["x-key"]), ("sample_ratio", 1.5)]
)
def test_wrong_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"otel.{field}"):
        load(None, {f"otel.{field}": value})
