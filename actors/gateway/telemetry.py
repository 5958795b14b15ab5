"""OpenTelemetry for a gateway: the tracer, the exporter's thread, and who of the clients asked to be traced.

The `otel` extra is imported only where `otel.endpoint` is set. Owns the provider; must not know what a request does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import epicycle
from epicycle.actors.gateway.request_trace import RequestTrace
from epicycle.transport.config import Config, ConfigError, OtelConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanProcessor

TRACES_PATH = "/v1/traces"


class Telemetry:
    """Spans go to `processor`, which must not wait."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("epicycle", epicycle.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, headers: Mapping[str, str], executors: Mapping[int, str]) -> RequestTrace | None:
        """The trace of a request, in the context of its W3C `traceparent`; None when it isn't sampled.

        `executors`: their names by epoch.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        parent = self._propagator.extract(carrier) if carrier else None
        root = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        if not root.is_recording():
            return None
        return RequestTrace(self._tracer, root, set_span_in_context(root, parent), executors)

    def close(self, timeout_s: float) -> None:
        """Export what waits, as far as the time goes; a collector that doesn't answer holds up nobody."""
        last = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        last.start()
        last.join(timeout_s)


def make_telemetry(config: Config, gateway: str) -> Telemetry | None:
    """None unless the server traces. Raises ConfigError without the extra."""
    if not config.otel.endpoint:
        return None
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"otel.endpoint needs the extra: pip install 'epicycle[otel]' ({error})") from error
    return Telemetry(make_provider(config.otel, gateway, BatchSpanProcessor(_exporter(config.otel))))


def make_provider(otel: OtelConfig, gateway: str, processor: SpanProcessor) -> TracerProvider:
    """Clients that send a `traceparent` decide for themselves whether they are sampled."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    names = {"service.name": otel.service_name, "service.version": epicycle.__version__, "service.instance.id": gateway}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(otel.sample_ratio)),
        resource=Resource.create(names),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


def _exporter(otel: OtelConfig) -> object:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    headers = dict(header.split("=", 1) for header in otel.headers)
    return OTLPSpanExporter(endpoint=traces_url(otel.endpoint), headers=headers)


def traces_url(endpoint: str) -> str:
    """A collector's base address or the whole address of its traces."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
