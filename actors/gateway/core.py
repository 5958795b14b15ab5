"""What the gateway's routes share: configuration, the served model, the table, and the way to start a generation.

Composition of the gateway's own parts, free of HTTP, so that the ZeroMQ endpoint uses the same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.generation import Generation
from epicycle.actors.gateway.health_cache import HealthCache
from epicycle.actors.gateway.links import ControlLinks
from epicycle.actors.gateway.metrics import GatewayMetrics
from epicycle.actors.gateway.pieces import Sink
from epicycle.actors.gateway.recording import Recording, make_recorder
from epicycle.actors.gateway.request_trace import RequestTrace
from epicycle.actors.gateway.served import ModelFiles, Served, serve
from epicycle.actors.gateway.spec import Spec
from epicycle.actors.gateway.table import Table
from epicycle.actors.gateway.telemetry import make_telemetry
from epicycle.actors.gateway.tokenizer import ServedTokenizer
from epicycle.actors.gateway.validate import Validator
from epicycle.actors.gateway.watching import Watcher
from epicycle.actors.ports import Host
from epicycle.transport.wire.control import Capabilities


class Core:
    """All methods on the gateway's loop."""

    def __init__(self, host: Host, number: int, files: ModelFiles, threads: Executor) -> None:
        self.name = host.name
        self.number = number
        self.epoch = host.epoch
        self.config = host.config
        self.files = files
        self.table = Table(number, host.epoch)
        self.links = ControlLinks(host.fabric)
        self.metrics = GatewayMetrics()
        self.validator = Validator(host.config, threads)
        self.health = HealthCache(host)
        self.recorder = make_recorder(host.config, host.name)
        self.telemetry = make_telemetry(host.config, host.name)
        self.served: Served | None = None
        self.is_known_to_control = False  # one of the executors that are up here, so that it takes requests for it
        self.is_draining = False

    def set_facts(self, facts: Capabilities | None) -> None:
        """These are the facts to check requests against; None: no executor is up."""
        self.served = None if facts is None else serve(self.files, facts)

    def admit(self) -> Served:
        """What a new request is checked against. Raises ApiError 503 when none can be taken."""
        if self.is_draining:
            raise ApiError("draining", "the server is shutting down and takes no new requests")
        if self.served is None:
            raise ApiError("not_ready", "no executor is ready: it is loading or restarting")
        if not self.links.is_up:
            raise ApiError("not_ready", "the control process is not up: it is starting or restarting")
        if not self.is_known_to_control:
            raise ApiError("not_ready", "an executor is ready, but the control process hasn't heard of it yet")
        return self.served

    def trace(self, name: str, headers: Mapping[str, str]) -> RequestTrace | None:
        """The OpenTelemetry trace of a request that has just come in; None when there is none."""
        return self.telemetry.start(name, headers, self.table.executors) if self.telemetry is not None else None

    def generation(
        self, spec: Spec, sink: Sink, tokenizer: ServedTokenizer | None, trace: RequestTrace | None
    ) -> Generation:
        watchers: list[Watcher] = [] if trace is None else [trace]
        if self.recorder is not None:
            watchers.append(Recording(self.recorder, spec))
        return Generation(spec, sink, self.table, self.links, self.metrics, tokenizer, watchers)

    def counters(self) -> dict[str, float]:
        """What this gateway's heartbeats carry."""
        counts, mine = self.table.counts, f'{{gateway="{self.name}"}}'
        counters: dict[str, float] = {
            f'stale_messages_total{{actor="{self.name}"}}': counts.other_epoch + counts.late_terminals,
            'send_again_total{link="submit"}': self.links.refused_sends,
            f"gateway_in_flight{mine}": len(self.table),
            f"gateway_unsent_cancels{mine}": self.links.waiting_cancels,
        }
        if self.recorder is not None:
            counters |= self.recorder.counters()
        return counters | self.metrics.counters(self.name)
