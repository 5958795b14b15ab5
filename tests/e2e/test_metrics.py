"""What /metrics shows of a running server: every promised name, nothing that an actor sends left out, and no query of
the dashboard without its metric.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epicycle.actors.gateway.beat_metrics import beat_families, is_known
from epicycle.actors.gateway.metrics import exposition
from epicycle.transport.wire.control import ActorHealth
from tests.e2e.client import Client
from tests.fakes.stack import Stack

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "epicycle.json"
SCRAPERS_LABELS = {"instance", "job"}  # Prometheus adds these itself

PROMISED = [
    "requests_running",
    "requests_waiting{reason}",
    "kv_pages{state}",
    "kv_usage_ratio",
    "mailbox_depth{actor,link}",
    "heartbeat_age_seconds{actor}",
    "progress_age_seconds{actor}",
    "prompt_tokens_total",
    "generation_tokens_total",
    "ticks_total",
    "core_row_loops_total{kind}",
    "loops_saved_total",
    "requests_finished_total{reason}",
    "aborts_total{cause}",
    "rejections_total{code}",
    "preemptions_total",
    "resumes_total",
    "prefix_evicted_pages_total",
    "prefix_spilled_pages_total",
    "prefix_host_hit_tokens_total",
    "host_pages{state}",
    "kv_plan{term}",
    "starved_total{kind}",
    "stale_messages_total{actor}",
    "send_again_total{link}",
    "restarts_total{actor}",
    "prefix_query_tokens_total",
    "prefix_hit_tokens_total",
    "ttft_seconds_bucket{le}",
    "itl_seconds_bucket{le}",
    "e2e_seconds_bucket{le}",
    "queue_seconds_bucket{le}",
    "prefill_seconds_bucket{le}",
    "decode_seconds_bucket{le}",
    "rows_per_tick_bucket{le}",
    "loops_per_token_bucket{le}",
]
PROMISED_ALIASES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason{reason}",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "time_to_first_token_seconds_bucket{le}",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total{finished_reason}",
    "e2e_request_latency_seconds_bucket{le}",
    "inter_token_latency_seconds_bucket{le}",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_queue_time_seconds_bucket{le}",
    "request_prefill_time_seconds_bucket{le}",
    "request_decode_time_seconds_bucket{le}",
]

_NAME = re.compile(r"\b(?:epicycle_|vllm:)[a-z0-9_]+")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")


@dataclass
class Shown:
    """Sample names of a page, each with the labels that some series of it has."""

    labels: dict[str, set[str]] = field(default_factory=dict)

    @staticmethod
    def of(page: str) -> Shown:
        shown = Shown()
        for family in text_string_to_metric_families(page):
            shown.labels.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
            for sample in family.samples:
                shown.labels.setdefault(sample.name, set()).update(sample.labels)
        return shown


@pytest.fixture
async def used() -> AsyncIterator[Stack]:
    """A server that has answered, refused and lost a request."""
    async with Stack() as stack, Client(stack.base_url) as client:
        assert 200 == (await client.complete(max_tokens=4)).status
        assert 400 == (await client.complete(max_tokens=-1)).status
        yield stack


async def shown_by(stack: Stack) -> Shown:
    async with Client(stack.base_url) as client:
        return Shown.of((await client.get("/metrics")).body.decode())


def queries(node: Any) -> Iterator[str]:
    """Every PromQL text of a dashboard: panels' expressions and variables' queries."""
    if isinstance(node, dict):
        yield from (node[key] for key in ("expr", "definition") if isinstance(node.get(key), str))
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from queries(child)


@pytest.mark.parametrize(
    "promised", [*(f"epicycle_{name}" for name in PROMISED), *(f"vllm:{name}" for name in PROMISED_ALIASES)]
)
async def test_every_promised_name_is_there_with_its_labels(used: Stack, promised: str) -> None:
    name, _, labels = promised.rstrip("}").partition("{")
    shown = (await shown_by(used)).labels

    assert name in shown
    assert set(filter(None, labels.split(","))) <= shown[name]


async def test_every_query_of_the_dashboard_finds_its_metrics_and_labels(used: Stack) -> None:
    shown = (await shown_by(used)).labels
    asked = list(queries(json.loads(DASHBOARD.read_text())))

    assert len(asked) > 30
    for query in asked:
        names = _NAME.findall(query)
        assert names, query
        assert not [name for name in names if name not in shown], query
        known = SCRAPERS_LABELS.union(*(shown[name] for name in names))
        matched = {label for group in _MATCHERS.findall(query) for label in _MATCHED.findall(group)}
        grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",")} - {""}
        assert not (matched | grouped) - known, query


async def test_nothing_that_an_actor_counts_is_left_out(used: Stack) -> None:
    counters = [counter for host in used.hosts if host.actor for counter in host.actor.beat_facts().counters]

    assert len(counters) > 30
    assert [] == [counter for counter in counters if not is_known(counter)]


async def test_any_gateway_shows_what_the_others_count(stack: Stack) -> None:
    async with Client(stack.base_url) as client:
        await client.complete(max_tokens=3)
        await client.complete(max_tokens=3)
    mine = stack.gateway.core.counters()
    theirs = {key.replace("gw0", "gw1"): value for key, value in mine.items()}
    stale = {key: value + 99 for key, value in mine.items()}
    actors = [
        ActorHealth(name, 1, "ready", 1, 0, 0.0, 0.0, 0, 0, 0, counters=counters)
        for name, counters in (("gw0", stale), ("gw1", theirs))
    ]
    reply = msgspec.structs.replace(stack.gateway_host.health_reply, actors=actors)
    page = exposition("m", "gw0", mine, reply).decode()

    for gateway in ("gw0", "gw1"):
        assert f'epicycle_requests_finished_total{{gateway="{gateway}",reason="length"}} 2.0' in page
        assert f'epicycle_ttft_seconds_count{{gateway="{gateway}"}} 2.0' in page
    assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 4.0' in page


async def test_scrapes_under_load_parse_and_counters_only_grow(stack: Stack) -> None:
    before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    async with Client(stack.base_url) as client:
        load = [asyncio.create_task(client.complete(f"story {at}", max_tokens=40)) for at in range(24)]
        while not all(task.done() for task in load):
            families = text_string_to_metric_families((await client.get("/metrics")).body.decode())
            growing = [
                sample for family in families if family.type in ("counter", "histogram") for sample in family.samples
            ]
            now = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in growing}
            assert [] == [key for key, value in before.items() if now[key] < value]
            before = now
        assert {200} == {(await task).status for task in load}
        assert 24 == await client.metric('epicycle_requests_finished_total{gateway="gw0",reason="length"}')
        assert 0 == await client.metric("epicycle_gateway_in_flight")
    assert len(before) > 100


def test_labels_of_several_executors_keep_their_histograms_apart() -> None:
    beat = {
        f'{name}{{le="{bound}",executor="{executor}"}}': float(count)
        for name in ("rows_per_tick_bucket",)
        for executor, counts in (("ex0", (1, 2)), ("ex1", (3, 0)))
        for bound, count in zip(("8", "+Inf"), counts, strict=True)
    }
    sums = {'rows_in_ticks_total{executor="ex0"}': 30.0, 'rows_in_ticks_total{executor="ex1"}': 9.0}
    family = next(one for one in beat_families([beat | sums], "m") if one.name == "epicycle_rows_per_tick")
    samples = {(s.name.rpartition("_")[2], s.labels["executor"], s.labels.get("le")): s.value for s in family.samples}

    assert samples == {
        ("bucket", "ex0", "8"): 1.0,
        ("bucket", "ex0", "+Inf"): 3.0,
        ("count", "ex0", None): 3.0,
        ("sum", "ex0", None): 30.0,
        ("bucket", "ex1", "8"): 3.0,
        ("bucket", "ex1", "+Inf"): 3.0,
        ("count", "ex1", None): 3.0,
        ("sum", "ex1", None): 9.0,
    }


def test_a_series_without_a_label_that_others_have_shows_it_empty() -> None:
    beats = [{'stale_messages_total{actor="gw0"}': 1.0}, {"stale_messages_total": 2.0}]
    family = next(one for one in beat_families(beats, "m") if one.name == "epicycle_stale_messages")

    assert {"gw0": 1.0, "": 2.0} == {sample.labels["actor"]: sample.value for sample in family.samples}
