"""The metrics that a gateway counts itself, and the text of a scrape: its own, the beats' and health's.

Names that other actors feed stand in metric_names. With several gateways a scrape answers for the process it reached:
everything a gateway counts itself carries the label `gateway`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from epicycle.actors.gateway.beat_metrics import Series, beat_families, family_of
from epicycle.actors.gateway.metric_names import HISTOGRAM_ALIASES, PER_ACTOR, PREFIX
from epicycle.transport.wire.control import HealthReply
from epicycle.transport.wire.output import Fin

CONTENT_TYPE = CONTENT_TYPE_LATEST
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
E2E_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
STAGE_BOUNDS_S = (0.001, 0.003, *E2E_BOUNDS_S)  # an idle server queues and prefills in a few milliseconds
LOOPS_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ALIAS_SUCCESS = "vllm:request_success"


class Histogram:
    """Counts by bucket; as cheap as one bisection, since it sits on the path of every token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """Prometheus' cumulative form."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


@dataclass
class GatewayMetrics:
    """What one gateway counts itself."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS_S))
    loops_per_token: Histogram = field(default_factory=lambda: Histogram(LOOPS_BOUNDS))
    finishes: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def finished(self, reason: str, seconds: float) -> None:
        """One choice has ended."""
        self.finishes[reason] += 1
        self.e2e.observe(seconds)

    def failed(self, code: str, seconds: float) -> None:
        """A whole request has ended badly."""
        self.finished("error", seconds)
        if code == "timeout":
            self.aborted("deadline")
        elif code == "draining":
            self.aborted("shutdown")

    def aborted(self, cause: str) -> None:
        self.aborts[cause] += 1

    def timed(self, fin: Fin) -> None:
        """The executor's times of a sequence."""
        self.queue.observe(fin.queue_ms / 1e3)
        self.prefill.observe(fin.prefill_ms / 1e3)
        self.decode.observe(fin.decode_ms / 1e3)


@dataclass(frozen=True)
class GatewayGauges:
    """What the rest of the gateway knows at the moment of a scrape."""

    name: str
    model_id: str
    in_flight: int
    waiting_cancels: int


def exposition(counts: GatewayMetrics, gauges: GatewayGauges, reply: HealthReply | None) -> bytes:
    """The Prometheus text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(counts, gauges, reply))
    return generate_latest(registry)


class _Scrape:
    """Meets prometheus_client's collector for the length of one scrape."""

    def __init__(self, counts: GatewayMetrics, gauges: GatewayGauges, reply: HealthReply | None) -> None:
        self._counts = counts
        self._gauges = gauges
        self._reply = reply

    def collect(self) -> Iterator[Metric]:
        beats = [actor.counters for actor in self._reply.actors] if self._reply is not None else []
        yield from beat_families(beats, self._gauges.model_id)
        yield from self._own_counters()
        yield from self._own_histograms()
        if self._reply is not None:
            yield from _health_families(self._reply)

    def _own_counters(self) -> Iterator[Metric]:
        name = self._gauges.name
        finished = CounterMetricFamily(f"{PREFIX}requests_finished", "choices ended", labels=["gateway", "reason"])
        for reason in sorted({"stop", "length", *self._counts.finishes}):
            finished.add_metric([name, reason], self._counts.finishes[reason])
        aborts = CounterMetricFamily(f"{PREFIX}aborts", "requests cut short", labels=["gateway", "cause"])
        for cause in sorted({"client", "deadline", "shutdown", "slow_client", *self._counts.aborts}):
            aborts.add_metric([name, cause], self._counts.aborts[cause])
        in_flight = GaugeMetricFamily(f"{PREFIX}gateway_in_flight", "sequences in flight here", labels=["gateway"])
        in_flight.add_metric([name], self._gauges.in_flight)
        cancels = GaugeMetricFamily(f"{PREFIX}gateway_unsent_cancels", "cancels not sent yet", labels=["gateway"])
        cancels.add_metric([name], self._gauges.waiting_cancels)
        yield from (finished, aborts, in_flight, cancels)
        success = CounterMetricFamily(ALIAS_SUCCESS, "as requests_finished", labels=["finished_reason", "model_name"])
        for reason in ("stop", "length"):
            success.add_metric([reason, self._gauges.model_id], self._counts.finishes[reason])
        yield success

    def _own_histograms(self) -> Iterator[Metric]:
        counts, labels = self._counts, {"gateway": self._gauges.name}
        shown: dict[str, tuple[Histogram, str]] = {
            "ttft_seconds": (counts.ttft, "time to the first token"),
            "itl_seconds": (counts.itl, "time between a sequence's token messages"),
            "e2e_seconds": (counts.e2e, "time from acceptance of the body to the end"),
            "queue_seconds": (counts.queue, "time without a slot"),
            "prefill_seconds": (counts.prefill, "time from slot to first token"),
            "decode_seconds": (counts.decode, "time from first to last token"),
            "loops_per_token": (counts.loops_per_token, "loops run per generated token"),
        }
        for name, (histogram, text) in shown.items():
            yield histogram.family(PREFIX + name, text, labels)
        labels["model_name"] = self._gauges.model_id
        for alias, name in HISTOGRAM_ALIASES.items():
            yield shown[name][0].family(alias, f"as {PREFIX}{name}", labels)


def _health_families(reply: HealthReply) -> Iterator[Metric]:
    beat_age = GaugeMetricFamily(f"{PREFIX}heartbeat_age_seconds", "since the last heartbeat", labels=["actor"])
    progress = GaugeMetricFamily(f"{PREFIX}progress_age_seconds", "since the last progress", labels=["actor"])
    restarts = CounterMetricFamily(f"{PREFIX}restarts", "restarts of a process", labels=["actor"])
    memory = GaugeMetricFamily(f"{PREFIX}resident_bytes", "resident memory of a process", labels=["actor"])
    depth = GaugeMetricFamily(f"{PREFIX}mailbox_depth", "messages waiting", labels=["actor", "link"])
    for actor in reply.actors:
        beat_age.add_metric([actor.name], max(0.0, actor.beat_age_ms / 1e3))
        progress.add_metric([actor.name], max(0.0, actor.progress_age_ms / 1e3))
        restarts.add_metric([actor.name], actor.restarts)
        memory.add_metric([actor.name], actor.rss_bytes)
        for stat in actor.mailboxes:
            depth.add_metric([actor.name, stat.link], stat.depth)
    yield from (beat_age, progress, restarts, memory, depth)
    for name, text in PER_ACTOR.items():
        series: Series = {
            (("actor", actor.name),): actor.counters[name] for actor in reply.actors if name in actor.counters
        }
        yield family_of(PREFIX + name, "gauge", text, series)
