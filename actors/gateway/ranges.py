"""Ranges of the numeric fields, and the checks that raise when a value lies outside.

Closed intervals tested as "not inside", so that nothing that compares oddly can slip through. Texts name value and
limit.
"""

from __future__ import annotations

from typing import TypeVar

from epicycle.actors.gateway.errors import invalid

N = TypeVar("N", int, float)

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
PRIORITY_LIMIT = 1 << 31
STOPS_LIMIT = 16
LABEL_LIMIT = 1024  # characters of cache_salt and session_id
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "exit_threshold": (0.0, 1.0),
}
OPEN_RANGES: dict[str, tuple[float, float]] = {"top_p": (0.0, 1.0), "repetition_penalty": (0.0, 10.0)}  # low excluded
BIAS_LIMIT = 100.0


def inside(field: str, value: N, low: float, high: float) -> N:
    """`value`, which must lie in [low, high]."""
    if not low <= value <= high:
        raise invalid(field, f"{field} is {value}, must be between {low:g} and {high:g}")
    return value


def whole(field: str, value: int, low: int, high: int, *, limit: str = "") -> int:
    """`value`, which must lie in [low, high]; `limit` says where the upper bound comes from."""
    if not low <= value <= high:
        why = f" ({limit})" if limit else ""
        raise invalid(field, f"{field} is {value}, must be between {low} and {high}{why}")
    return value


def real(field: str, value: float | None, default: float) -> float:
    """A float field by the tables above."""
    if value is None:
        return default
    if field in RANGES:
        return inside(field, value, *RANGES[field])
    low, high = OPEN_RANGES[field]
    if not low < value <= high:
        raise invalid(field, f"{field} is {value}, must be above {low:g} and at most {high:g}")
    return value


def token_ids(field: str, ids: list[int], vocab_size: int) -> list[int]:
    """`ids`, all of them tokens of the model. Quick for long lists."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(field, f"{field} has token id {wrong}, ids must be between 0 and {vocab_size - 1} (vocabulary)")
    return ids


def stop_strings(stop: str | list[str] | None) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > STOPS_LIMIT:
        raise invalid("stop", f"stop has {len(stops)} strings, the limit is {STOPS_LIMIT}")
    if "" in stops:
        raise invalid("stop", "stop has an empty string; every stop needs at least one character")
    return stops


def logit_bias(bias: dict[str, float] | None, vocab_size: int, most: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > most:
        raise invalid("logit_bias", f"logit_bias has {len(bias)} entries, the limit is {most}")
    ids = [_bias_id(key, vocab_size) for key in bias]
    for value in bias.values():
        inside("logit_bias", value, -BIAS_LIMIT, BIAS_LIMIT)
    return dict(zip(ids, bias.values(), strict=True))


def _bias_id(key: str, vocab_size: int) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise invalid("logit_bias", f"logit_bias has key {key[:20]!r}, keys are token ids")
    return token_ids("logit_bias", [int(key)], vocab_size)[0]
