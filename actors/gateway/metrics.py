"""What a gateway counts itself, and the text of a scrape: its own counts, those of all beats, and health.

Names stand in metric_names; everything a gateway counts itself carries the label `gateway`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from epicycle.actors.gateway.beat_metrics import Series, beat_families, family_of
from epicycle.actors.gateway.metric_names import PER_ACTOR, PREFIX
from epicycle.transport.wire.control import HealthReply
from epicycle.transport.wire.output import Fin

CONTENT_TYPE = CONTENT_TYPE_LATEST
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
E2E_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
STAGE_BOUNDS_S = (0.001, 0.003, *E2E_BOUNDS_S)  # an idle server queues and prefills in a few milliseconds
LOOPS_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Shown from the start, so that a rate has a beginning.
END_REASONS = ("stop", "length")
ABORT_CAUSES = ("client", "deadline", "shutdown", "slow_client")


class Histogram:
    """Counts by bucket; as cheap as one bisection, since it sits on the path of every token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counters(self, name: str, labels: str) -> dict[str, float]:
        """As a heartbeat carries it. `labels`: more of them, such as `gateway="gw0"`."""
        bounds = (*map(str, map(float, self._bounds)), "+Inf")
        counted = zip(bounds, self._counts, strict=True)
        counters = {f'{name}_bucket{{{labels},le="{bound}"}}': float(count) for bound, count in counted}
        return counters | {f"{name}_sum{{{labels}}}": self._sum}


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

    def counters(self, gateway: str) -> dict[str, float]:
        """All of it, as this gateway's heartbeats carry it."""
        mine = f'gateway="{gateway}"'
        finishes, aborts = Counter(dict.fromkeys(END_REASONS, 0)), Counter(dict.fromkeys(ABORT_CAUSES, 0))
        finishes.update(self.finishes)
        aborts.update(self.aborts)
        counters = {f'requests_finished_total{{{mine},reason="{reason}"}}': float(n) for reason, n in finishes.items()}
        counters |= {f'aborts_total{{cause="{cause}",{mine}}}': float(n) for cause, n in aborts.items()}
        counters |= {f'rejections_total{{code="{code}"}}': float(n) for code, n in self.rejections.items()}
        histograms = {
            "ttft_seconds": self.ttft,
            "itl_seconds": self.itl,
            "e2e_seconds": self.e2e,
            "queue_seconds": self.queue,
            "prefill_seconds": self.prefill,
            "decode_seconds": self.decode,
            "loops_per_token": self.loops_per_token,
        }
        for name, histogram in histograms.items():
            counters |= histogram.counters(name, mine)
        return counters


def exposition(model_id: str, gateway: str, counters: dict[str, float], reply: HealthReply | None) -> bytes:
    """The Prometheus text of one scrape. `counters` are the answering gateway's own, newer than those of its beat."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(model_id, gateway, counters, reply))
    return generate_latest(registry)


class _Scrape:
    """Meets prometheus_client's collector for the length of one scrape."""

    def __init__(self, model_id: str, gateway: str, counters: dict[str, float], reply: HealthReply | None) -> None:
        self._model_id = model_id
        self._gateway = gateway
        self._counters = counters
        self._reply = reply

    def collect(self) -> Iterator[Metric]:
        actors = self._reply.actors if self._reply is not None else []
        others = [actor.counters for actor in actors if actor.name != self._gateway]
        yield from beat_families([self._counters, *others], self._model_id)
        if self._reply is not None:
            yield from _health_families(self._reply)


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
