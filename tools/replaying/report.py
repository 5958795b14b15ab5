"""The HTML report of a run: one file that needs nothing else, for people.

Owns what is shown and for how many conversations it remembers spans. The figures are those of the summary.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from epicycle.tools.replaying.figures import Figures
from epicycle.tools.replaying.observed import RequestRecord
from epicycle.tools.replaying.svg import COLOURS, Lane, bars, curves, short, timeline

LANES = 48
SPANS_A_LANE = 400
WAIT, PROMPT, DECODE, FAILED = "#e8d9b5", COLOURS[0], COLOURS[2], "#c0392b"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin: 2em 0 .4em }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } svg { width: 100%; height: auto; background: #fff }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26em, 1fr)); gap: 1.5em }
.key span { padding: 0 .6em; margin-right: .8em; color: #fff; border-radius: 2px }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 12px } .bad { color: #c0392b }
"""


class Timeline:
    """Spans of the first conversations: waiting for tools, reading the prompt, decoding."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._ended_ms: dict[str, float] = {}

    def add(self, record: RequestRecord) -> None:
        name = record.session or record.id
        lane = self._lanes.get(name)
        if lane is None and len(self._lanes) < LANES:
            lane = self._lanes[name] = Lane(name)
        if lane is None or record.sent_ms is None or record.end_ms is None or len(lane.spans) >= SPANS_A_LANE:
            return
        before_ms = self._ended_ms.get(name)
        if before_ms is not None and record.sent_ms > before_ms:
            words = f"waited {record.sent_ms - before_ms:,.1f} ms {', '.join(record.tools)}"
            lane.spans.append((before_ms, record.sent_ms, WAIT, words))
        self._ended_ms[name] = max(before_ms or 0.0, record.end_ms)
        label = f"{record.id}: turn {record.turn + 1}, {record.tokens_in or record.prompt_tokens or '?'} tokens in"
        if record.outcome == "failed" or record.first_token_ms is None:
            lane.spans.append((record.sent_ms, record.end_ms, FAILED, f"{label}: {record.code or 'no token'}"))
            return
        ttft_ms = record.first_token_ms - record.sent_ms
        lane.spans.append((record.sent_ms, record.first_token_ms, PROMPT, f"{label}; first token {ttft_ms:,.1f} ms"))
        lane.spans.append((record.first_token_ms, record.end_ms, DECODE, f"{record.tokens_out} tokens out"))

    def lanes(self) -> list[Lane]:
        return [self._lanes[name] for name in sorted(self._lanes)]


def render(summary: dict[str, Any], figures: Figures, spans: Timeline) -> str:
    """The whole page."""
    title = f"Replay of {summary['trace']['name']} at {summary['target']['name']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _headline(summary),
        "<h2>Latency</h2>",
        _latency_table(summary),
        '<div class="plots">',
        _plot("Latency, share of requests", curves(_latencies(figures), "ms", "share")),
        _plot("Between tokens", curves({"ITL": figures.values["itl_ms"].curve()}, "ms", "share of gaps")),
        _plot("Loops per token", bars(_loops(figures), "loops", "tokens")),
        _plot("Prompt tokens from the cache, by turn", bars(_hits(summary), "turn", "share", is_share=True)),
        "</div>",
        "<h2>Conversations</h2>",
        _key(),
        timeline(spans.lanes(), "since the first request"),
        "<h2>Summary</h2>",
        f"<pre>{escape(json.dumps(summary, indent=1))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _plot(title: str, picture: str) -> str:
    return f"<div><h2>{escape(title)}</h2>{picture}</div>"


def _headline(summary: dict[str, Any]) -> str:
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in summary["requests"].items())
    facts = [f"{counts} in {summary['wall_s']:,.1f} s", f"{summary['output_tokens']:,} tokens out"]
    if summary["tokens_per_s"]:
        facts.append(f"{summary['tokens_per_s']:,.1f} tokens/s")
    if summary["cache_hit_share"] is not None:
        facts.append(f"{summary['cache_hit_share']:.1%} of prompt tokens from the cache")
    if summary["mean_loops"] is not None:
        facts.append(f"{summary['mean_loops']:.2f} loops a token")
    if summary["goodput"] and summary["goodput"]["share"] is not None:
        facts.append(f"{summary['goodput']['share']:.1%} within the SLO")
    text = f"<p>{escape('; '.join(facts))}.</p>"
    if not summary["is_valid"]:
        text += f'<p class="bad">Not valid: {escape("; ".join(summary["warnings"]))}</p>'
    return text


def _latency_table(summary: dict[str, Any]) -> str:
    rows = "<tr><th>ms</th><th>count</th><th>p50</th><th>p90</th><th>p99</th><th>max</th></tr>"
    for name, cuts in [*summary["latency"].items(), ("schedule_lag_ms", summary["schedule_lag_ms"])]:
        cells = "".join(f"<td>{short(cuts[cut]) if cut in cuts else '-'}</td>" for cut in ("p50", "p90", "p99", "max"))
        label = name.removesuffix("_ms").replace("_", " ")
        label = label if " " in label else label.upper()
        rows += f"<tr><td>{label}</td><td>{cuts['count']:,.0f}</td>{cells}</tr>"
    return f"<table>{rows}</table>"


def _latencies(figures: Figures) -> dict[str, Any]:
    named = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms"}
    return {label: figures.values[name].curve() for label, name in named.items()}


def _loops(figures: Figures) -> list[tuple[str, float | None]]:
    if not figures.depths:
        return []
    return [(str(depth), float(figures.depths[depth])) for depth in range(1, max(figures.depths) + 1)]


def _hits(summary: dict[str, Any]) -> list[tuple[str, float | None]]:
    return [(str(turn["turn"]), turn["cache_hit_share"]) for turn in summary["by_turn"]]


def _key() -> str:
    names = (("prompt", PROMPT), ("decode", DECODE), ("tools or waiting", WAIT), ("failed", FAILED))
    words = "".join(
        f'<span style="background:{colour}{";color:#222" if colour == WAIT else ""}">{name}</span>'
        for name, colour in names
    )
    return f'<p class="key">{words} the first {LANES} conversations</p>'
