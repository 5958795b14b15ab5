"""Every metric name of the server, and what feeds each. Prefix `epicycle_`; documented vLLM aliases beside them.

Two sources: the gateway's own counts and histograms, and the counters that control and executors send with their
heartbeats (HealthReply.actors[].counters, keyed `name{label="value"}` without the prefix). With several gateways a
scrape answers for the process it reached: everything a gateway counts itself carries the label `gateway`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from epicycle.transport.wire.control import HealthReply
from epicycle.transport.wire.output import Fin

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "epicycle_"
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
E2E_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
LOOPS_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# What heartbeats may carry: name -> (kind, help). Names not listed here are not shown.
FROM_BEATS: dict[str, tuple[str, str]] = {
    "requests_running": ("gauge", "requests that hold a slot"),
    "requests_waiting": ("gauge", "requests without a first token yet, by what they wait for"),
    "kv_pages": ("gauge", "pages of the KV pool by state"),
    "kv_usage_ratio": ("gauge", "share of the KV pool that requests hold; cached prefixes count as free"),
    "prompt_tokens_total": ("counter", "prompt tokens taken in"),
    "generation_tokens_total": ("counter", "tokens generated"),
    "ticks_total": ("counter", "traversals of the recurrent core"),
    "rows_in_ticks_total": ("counter", "rows summed over ticks"),
    "mixed_depth_ticks_total": ("counter", "ticks with rows at different depths"),
    "core_row_loops_total": ("counter", "loops run, summed over rows"),
    "prefix_query_tokens_total": ("counter", "prompt tokens of requests that looked for a cached prefix"),
    "prefix_hit_tokens_total": ("counter", "prompt tokens not computed, since the prefix cache had them"),
    "session_pinned_pages": ("gauge", "pages that sessions keep in the prefix cache"),
    "loops_saved_total": ("counter", "loops not run because tokens left early"),
    "preemptions_total": ("counter", "requests taken off the device to make room"),
    "starved_total": ("counter", "times a row had to wait for its lease to grow, or ended because it could not"),
    "yielded_rows_total": ("counter", "rows that ended early to give up their pages"),
    "plans_total": ("counter", "plans sent to the executor"),
    "merged_plan_changes_total": ("counter", "plan changes merged into a pending plan"),
    "stale_messages_total": ("counter", "messages dropped for an epoch, slot or request that is gone"),
    "send_again_total": ("counter", "sends that found a link full"),
    "rejections_total": ("counter", "requests refused, by code"),
}
BUCKETS = "rows_per_tick_bucket"  # carried by beats too; shown as a histogram
# vLLM name -> (ours, labels to keep); dashboards made for it then work.
ALIASES: dict[str, str] = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting_by_reason": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage_ratio",
    "vllm:gpu_cache_usage_perc": "kv_usage_ratio",
}
ALIAS_WAITING = "vllm:num_requests_waiting"  # requests_waiting summed over reasons
ALIAS_TTFT = "vllm:time_to_first_token_seconds"

Series = dict[tuple[tuple[str, str], ...], float]  # labels -> value, of one name

_KEY = re.compile(r"([a-z_]+)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


class Histogram:
    """Counts by bucket; as cheap as one bisection, since it sits on the path of every token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, gateway: str) -> HistogramMetricFamily:
        """Prometheus' cumulative form."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, text, labels=["gateway"])
        family.add_metric([gateway], buckets, self._sum)
        return family


@dataclass
class GatewayMetrics:
    """What one gateway counts itself."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    decode: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
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
        yield from beat_families(beats)
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

    def _own_histograms(self) -> Iterator[Metric]:
        counts, name = self._counts, self._gauges.name
        yield counts.ttft.family(f"{PREFIX}ttft_seconds", "time to the first token", name)
        yield counts.ttft.family(ALIAS_TTFT, "as epicycle_ttft_seconds", name)
        yield counts.itl.family(f"{PREFIX}itl_seconds", "time between a sequence's token messages", name)
        yield counts.e2e.family(f"{PREFIX}e2e_seconds", "time from acceptance of the body to the end", name)
        yield counts.queue.family(f"{PREFIX}queue_seconds", "time without a slot", name)
        yield counts.prefill.family(f"{PREFIX}prefill_seconds", "time from slot to first token", name)
        yield counts.decode.family(f"{PREFIX}decode_seconds", "time from first to last token", name)
        yield counts.loops_per_token.family(f"{PREFIX}loops_per_token", "loops run per generated token", name)


def beat_families(beats: Iterable[dict[str, float]]) -> Iterator[Metric]:
    """The families of FROM_BEATS and their aliases; series of one name and labels from several actors add up."""
    series: dict[str, Series] = {name: {} for name in (*FROM_BEATS, BUCKETS)}
    for beat in beats:
        for key, value in beat.items():
            match = _KEY.fullmatch(key)
            if match is not None and match[1] in series:
                labels = tuple(_LABEL.findall(match[2] or ""))
                series[match[1]][labels] = series[match[1]].get(labels, 0.0) + value
    for name, (kind, text) in FROM_BEATS.items():
        yield _family(PREFIX + name, kind, text, series[name])
    yield _rows_per_tick(series)
    for alias, name in ALIASES.items():
        yield _family(alias, "gauge", f"as {PREFIX}{name}", series[name])
    waiting: Series = {(): sum(series["requests_waiting"].values())}
    yield _family(ALIAS_WAITING, "gauge", f"as {PREFIX}requests_waiting, summed", waiting)


def _rows_per_tick(series: dict[str, Series]) -> Metric:
    """Control sends how many ticks fell into each bucket; Prometheus wants them cumulative."""
    family = HistogramMetricFamily(f"{PREFIX}rows_per_tick", "rows of a tick")
    buckets: list[tuple[str, float]] = []
    for labels, count in series[BUCKETS].items():
        buckets.append((dict(labels)["le"], count + (buckets[-1][1] if buckets else 0)))
    family.add_metric([], buckets or [("+Inf", 0)], sum(series["rows_in_ticks_total"].values()))
    return family


def _family(name: str, kind: str, text: str, series: Series) -> Metric:
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    labels = next(([label for label, _ in key] for key in series), [])
    family = make(name.removesuffix("_total") if kind == "counter" else name, text, labels=labels)
    for key, value in sorted(series.items()):
        family.add_metric([value_of for _, value_of in key], value)
    if not series:
        family.add_metric([], 0.0)
    return family


def _health_families(reply: HealthReply) -> Iterator[Metric]:
    beat_age = GaugeMetricFamily(f"{PREFIX}heartbeat_age_seconds", "since the last heartbeat", labels=["actor"])
    progress = GaugeMetricFamily(f"{PREFIX}progress_age_seconds", "since the last progress", labels=["actor"])
    restarts = CounterMetricFamily(f"{PREFIX}restarts", "restarts of a process", labels=["actor"])
    depth = GaugeMetricFamily(f"{PREFIX}mailbox_depth", "messages waiting", labels=["actor", "link"])
    for actor in reply.actors:
        beat_age.add_metric([actor.name], max(0.0, actor.beat_age_ms / 1e3))
        progress.add_metric([actor.name], max(0.0, actor.progress_age_ms / 1e3))
        restarts.add_metric([actor.name], actor.restarts)
        for stat in actor.mailboxes:
            depth.add_metric([actor.name, stat.link], stat.depth)
    yield from (beat_age, progress, restarts, depth)
