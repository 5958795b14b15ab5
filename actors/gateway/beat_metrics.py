"""From what heartbeats carry to Prometheus families, by the tables in metric_names.

Knows keys of the form `name{label="value"}` and nothing of who sends them. Names without a line in the tables are left
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from epicycle.actors.gateway.metric_names import (
    ALIASES,
    FROM_BEATS,
    HISTOGRAM_ALIASES,
    HISTOGRAMS_FROM_BEATS,
    PER_ACTOR,
    PREFIX,
    SUMMED_ALIASES,
)

Labels = tuple[tuple[str, str], ...]  # sorted by name
Series = dict[Labels, float]  # of one name

BUCKET = "_bucket"
ALIAS_SUCCESS = "vllm:request_success_total"

_KEY = re.compile(r"([a-z_]+)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


_SUMMED = frozenset(
    (
        *FROM_BEATS,
        *(name + BUCKET for name in HISTOGRAMS_FROM_BEATS),
        *(total for total, _ in HISTOGRAMS_FROM_BEATS.values()),
    )
)


def name_of(key: str) -> str:
    """The name in a beat's key, without labels."""
    return key.partition("{")[0]


def is_known(key: str) -> bool:
    """Whether a beat's key has a line in the tables."""
    return name_of(key) in (*_SUMMED, *PER_ACTOR)


def beat_families(beats: Iterable[dict[str, float]], model_id: str) -> Iterator[Metric]:
    """All families but PER_ACTOR's; series of one name and labels from several actors add up."""
    series = _sum_up(beats)
    for name, (kind, text) in FROM_BEATS.items():
        yield family_of(PREFIX + name, kind, text, series[name])
    for name, (total, text) in HISTOGRAMS_FROM_BEATS.items():
        yield _histogram(PREFIX + name, text, series[name + BUCKET], series[total])
    yield from _aliases(series, ("model_name", model_id))


def _aliases(series: dict[str, Series], model: tuple[str, str]) -> Iterator[Metric]:
    for alias, name in ALIASES.items():
        shown = {tuple(sorted((*labels, model))): value for labels, value in series[name].items()}
        yield family_of(alias, FROM_BEATS[name][0], f"as {PREFIX}{name}", shown or {(model,): 0.0})
    for alias, name in SUMMED_ALIASES.items():
        summed: Series = {(model,): sum(series[name].values())}
        yield family_of(alias, FROM_BEATS[name][0], f"as {PREFIX}{name}, summed", summed)
    for alias, name in HISTOGRAM_ALIASES.items():
        total = HISTOGRAMS_FROM_BEATS[name][0]
        yield _histogram(alias, f"as {PREFIX}{name}", series[name + BUCKET], series[total], (model,))
    yield family_of(ALIAS_SUCCESS, "counter", "as requests_finished, by good ends", _good_ends(series, model))


def _good_ends(series: dict[str, Series], model: tuple[str, str]) -> Series:
    """vLLM names the reason otherwise, and counts bad ends elsewhere."""
    ends: Series = {}
    for labels, count in series["requests_finished_total"].items():
        reason = dict(labels).get("reason", "")
        if reason in ("stop", "length"):
            key = tuple(sorted((("finished_reason", reason), model)))
            ends[key] = ends.get(key, 0.0) + count
    return ends


def _sum_up(beats: Iterable[dict[str, float]]) -> dict[str, Series]:
    series: dict[str, Series] = {name: {} for name in _SUMMED}
    for beat in beats:
        for key, value in beat.items():
            match = _KEY.fullmatch(key)
            if match is not None and match[1] in series:
                labels = tuple(sorted(_LABEL.findall(match[2] or "")))
                series[match[1]][labels] = series[match[1]].get(labels, 0.0) + value
    return series


def family_of(name: str, kind: str, text: str, series: Series) -> Metric:
    """One gauge or counter. A label that a series lacks is empty, which Prometheus reads as absent."""
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    labels = sorted({label for key in series for label, _ in key})
    family = make(name.removesuffix("_total") if kind == "counter" else name, text, labels=labels)
    for key, value in sorted(series.items()):
        family.add_metric([dict(key).get(label, "") for label in labels], value)
    if not series:
        family.add_metric([], 0.0)
    return family


def _histogram(name: str, text: str, buckets: Series, sums: Series, more: Labels = ()) -> Metric:
    """Beats say how many fell into each bucket; Prometheus wants them cumulative, per set of the other labels.

    `more` labels come on top.
    """
    groups: dict[Labels, dict[str, float]] = {}
    for key, count in buckets.items():
        rest = tuple(pair for pair in key if pair[0] != "le")
        groups.setdefault(rest, {})[dict(key)["le"]] = count
    labels = sorted({label for rest in groups for label, _ in rest})
    family = HistogramMetricFamily(name, text, labels=[*labels, *(label for label, _ in more)])
    values = [value for _, value in more]
    for rest, counts in sorted(groups.items()):
        total, cumulative = 0.0, []
        for bound in sorted(counts, key=_bound):
            total += counts[bound]
            cumulative.append((bound, total))
        own = [dict(rest).get(label, "") for label in labels]
        family.add_metric([*own, *values], cumulative, _sum_of(sums, rest))
    if not groups:
        family.add_metric(values, [("+Inf", 0)], 0)
    return family


def _bound(le: str) -> float:
    return inf if le == "+Inf" else float(le)


def _sum_of(sums: Series, labels: Labels) -> float:
    """Of the series that have these labels, whatever others they have."""
    return sum(value for key, value in sums.items() if set(labels) <= set(key))
