"""From records to figures: percentiles in bounded memory, rates, goodput, cache hits and loops.

Owns the definitions of every figure a replay prints. Failures are counted by kind and never enter a latency.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from epicycle.tools.replaying.observed import Observed, RequestRecord

PERCENTILES = (50, 90, 95, 99)
EXACT = 1 << 16
LAST_TURN = 63  # later ones are summed with it
MOST_KINDS = 100
BIN = 1.005  # widths of bins once values are too many to keep: half a per cent
LEAST_MS = 1e-3
CURVE_POINTS = 200


class Values:
    """Numbers of at least 0: exact while they are few, then counted in bins of half a per cent."""

    def __init__(self) -> None:
        self._exact: array[float] = array("d")
        self._bins: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        if self._bins:
            self._bins[_bin(value)] += 1
            return
        self._exact.append(value)
        if len(self._exact) > EXACT:
            self._bins.update(map(_bin, self._exact))
            self._exact = array("d")

    def cuts(self) -> dict[str, float]:
        """p50, p90, p95, p99, mean, max and count; only the count of nothing."""
        if not self.count:
            return {"count": 0}
        shares = [share / 100 for share in PERCENTILES]
        values = [self._binned(one) for one in shares] if self._bins else np.quantile(self._exact, shares).tolist()
        named = {f"p{share}": value for share, value in zip(PERCENTILES, values, strict=True)}
        return {"count": self.count, **named, "mean": self.total / self.count, "max": self.most}

    def curve(self) -> list[tuple[float, float]]:
        """Points (value, share at most that) for a picture."""
        if not self.count:
            return []
        shares = [index / CURVE_POINTS for index in range(CURVE_POINTS + 1)]
        if self._bins:
            return [(self._binned(share), share) for share in shares]
        return list(zip(np.quantile(self._exact, shares).tolist(), shares, strict=True))

    def _binned(self, share: float) -> float:
        wanted, seen = share * self.count, 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted:
                return float(LEAST_MS * BIN ** (index + 0.5))
        return self.most


def _bin(value: float) -> int:
    return math.floor(math.log(max(value, LEAST_MS) / LEAST_MS, BIN))


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds in milliseconds that a good request keeps; 0: none."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0

    def keeps(self, ttft_ms: float, tpot_ms: float | None, e2e_ms: float) -> bool:
        return all(
            not bound or value is None or value <= bound
            for value, bound in ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms), (e2e_ms, self.e2e_ms))
        )

    @property
    def is_set(self) -> bool:
        return bool(self.ttft_ms or self.tpot_ms or self.e2e_ms)


@dataclass
class Turn:
    """Sums over the requests of one turn number."""

    requests: int = 0
    tokens_in: int = 0
    cached: int = 0
    ttft_ms: float = 0.0


@dataclass
class Figures:
    """Fed record by record; its size doesn't grow with them, but for one entry a turn number and depth."""

    slo: Slo = field(default_factory=Slo)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)
    finishes: Counter[str] = field(default_factory=Counter)
    values: dict[str, Values] = field(
        default_factory=lambda: {
            name: Values() for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "lag_ms", "held_ms")
        }
    )
    depths: Counter[int] = field(default_factory=Counter)
    turns: dict[int, Turn] = field(default_factory=dict)
    good: int = 0
    good_tokens: int = 0
    short: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hits_of: int = 0
    hits: int = 0
    first_sent_ms: float = math.inf
    last_end_ms: float = 0.0

    def add(self, record: RequestRecord, seen: Observed | None) -> None:
        self.outcomes[record.outcome] += 1
        if record.sent_ms is None or record.end_ms is None:
            return
        self.first_sent_ms = min(self.first_sent_ms, record.sent_ms)
        self.last_end_ms = max(self.last_end_ms, record.last_token_ms or record.end_ms)
        self.values["lag_ms"].add(record.lag_ms or 0.0)
        self.values["held_ms"].add(record.held_ms)
        if record.outcome == "failed":
            code = record.code if record.code in self.failures or len(self.failures) < MOST_KINDS else "others"
            self.failures[code] += 1
            self.first_errors.setdefault(code, record.error)
            return
        self.finishes[record.finish_reason or "none"] += 1
        self._add_answer(record, seen)

    def _add_answer(self, record: RequestRecord, seen: Observed | None) -> None:
        times = seen.token_ms if seen is not None else array("d")
        self.output_tokens += record.tokens_out
        self.prompt_tokens += record.tokens_in or record.prompt_tokens or 0
        self.short += record.tokens_out < (record.asked_tokens or 0)
        self.depths.update(record.exit_depths)
        self._add_hits(record, times)
        if not times or record.sent_ms is None:
            return
        ttft_ms, e2e_ms = times[0] - record.sent_ms, times[-1] - record.sent_ms
        tpot_ms = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        self.values["ttft_ms"].add(ttft_ms)
        self.values["e2e_ms"].add(e2e_ms)
        if tpot_ms is not None:
            self.values["tpot_ms"].add(tpot_ms)
        for earlier, later in pairwise(times):
            self.values["itl_ms"].add(later - earlier)
        if self.slo.keeps(ttft_ms, tpot_ms, e2e_ms):
            self.good += 1
            self.good_tokens += record.tokens_out

    def _add_hits(self, record: RequestRecord, times: Sequence[float]) -> None:
        turn = self.turns.setdefault(min(record.turn, LAST_TURN), Turn())
        turn.requests += 1
        turn.ttft_ms += times[0] - (record.sent_ms or 0.0) if times else 0.0
        if record.cached_tokens is None or not record.tokens_in:
            return
        self.hits += record.cached_tokens
        self.hits_of += record.tokens_in
        turn.cached += record.cached_tokens
        turn.tokens_in += record.tokens_in

    @property
    def wall_s(self) -> float:
        """From the first request sent to the last token."""
        return max(0.0, self.last_end_ms - self.first_sent_ms) / 1e3 if self.first_sent_ms < math.inf else 0.0

    def summary(self) -> dict[str, Any]:
        """Every figure of the run, as JSON."""
        seconds = self.wall_s
        loops = sum(depth * count for depth, count in self.depths.items())
        return {
            "requests": dict(self.outcomes),
            "failures": {
                code: {"count": count, "first": self.first_errors[code]} for code, count in self.failures.items()
            },
            "finish_reasons": dict(self.finishes),
            "wall_s": seconds,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_per_s": self.output_tokens / seconds if seconds else None,
            "shorter_than_asked": self.short,
            "latency": {name: self.values[name].cuts() for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")},
            "goodput": self._goodput(seconds),
            "cache_hit_share": self.hits / self.hits_of if self.hits_of else None,
            "mean_loops": loops / self.depths.total() if self.depths else None,
            "schedule_lag_ms": self.values["lag_ms"].cuts(),
            "held_ms": self.values["held_ms"].cuts(),
            "by_turn": [
                {
                    "turn": number + 1,
                    "requests": turn.requests,
                    "cache_hit_share": turn.cached / turn.tokens_in if turn.tokens_in else None,
                    "mean_ttft_ms": turn.ttft_ms / turn.requests,
                }
                for number, turn in sorted(self.turns.items())
            ],
        }

    def _goodput(self, seconds: float) -> dict[str, Any] | None:
        """None without bounds. The share is of all requests that were sent, failures included."""
        if not self.slo.is_set:
            return None
        sent = self.outcomes["ok"] + self.outcomes["failed"]
        return {
            "slo": {name: value for name, value in vars(self.slo).items() if value},
            "share": self.good / sent if sent else None,
            "requests_per_s": self.good / seconds if seconds else None,
            "tokens_per_s": self.good_tokens / seconds if seconds else None,
        }
