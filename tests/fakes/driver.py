"""Drives a `LoopedModel` for tests: prompts at full depth, then tokens that leave by the gate's rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from epicycle.engine.models.base import LoopedModel
from tests.fakes.rows import DenseRows, SequenceCache


def logits_by_depth(model: LoopedModel, ids: list[int], noise_seed: int = 0) -> list[Tensor]:
    """Logits [T, V] after every depth, each as if it were the last; the whole prompt is one call."""
    rows = _prompt_rows(SequenceCache(model.spec, len(ids)), 0, len(ids), noise_seed)
    state = model.prelude(torch.tensor(ids), rows)
    logits = []
    for depth in range(model.spec.loops):
        rows.depths = torch.full((len(ids),), depth)
        state, _ = model.loop(state, rows)
        logits.append(model.head(model.coda(state, rows)))
    return logits


def prefill(
    model: LoopedModel, cache: SequenceCache, ids: list[int], chunk: int | None = None, noise_seed: int = 0
) -> Tensor:
    """LM-head input [T, H] of a prompt after full depth, its rows fed `chunk` at a time."""
    outputs = []
    for first in range(0, len(ids), chunk or len(ids)):
        part = torch.tensor(ids[first : first + (chunk or len(ids))])
        rows = _prompt_rows(cache, first, len(part), noise_seed)
        state = model.prelude(part, rows)
        for depth in range(model.spec.loops):
            rows.depths = torch.full((len(part),), depth)
            state, _ = model.loop(state, rows)
        outputs.append(model.coda(state, rows))
    return torch.cat(outputs)


@dataclass
class Served:
    """Greedy ids (a stop id included), exit depths, and how near each decision was to another outcome."""

    ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    token_margins: list[float] = field(default_factory=list)  # best logit minus second best
    exit_margins: list[float] = field(default_factory=list)  # smallest |F - threshold| on the way


def serve(
    model: LoopedModel,
    prompt: list[int],
    *,
    count: int,
    threshold: float = 1.0,
    min_loops: int = 1,
    max_loops: int | None = None,
    stop: tuple[int, ...] = (),
) -> Served:
    """At most `count` greedy tokens; exit_depths[i] is the loops run by the token whose state gave ids[i]."""
    cache = SequenceCache(model.spec, len(prompt) + count)
    served, limit = Served(), max_loops or model.spec.loops
    x, depth, margin = prefill(model, cache, prompt)[-1:], model.spec.loops, 1.0
    while True:
        logits = model.head(x)[0]
        best, second = logits.topk(2).values.tolist()
        served.ids.append(int(logits.argmax()))
        served.exit_depths.append(depth)
        served.token_margins.append(best - second)
        served.exit_margins.append(margin)
        if served.ids[-1] in stop or len(served.ids) == count:
            return served
        position = len(prompt) + len(served.ids) - 1
        x, depth, margin = _decode(model, cache, served.ids[-1], position, threshold, min_loops, limit)


def _prompt_rows(cache: SequenceCache, first: int, count: int, noise_seed: int) -> DenseRows:
    return DenseRows([cache] * count, list(range(first, first + count)), [0] * count, noise_seed)


def _decode(
    model: LoopedModel, cache: SequenceCache, token: int, position: int, threshold: float, min_loops: int, limit: int
) -> tuple[Tensor, int, float]:
    """(LM-head input, loops run, smallest |F - threshold|) of one generated token."""
    rows = DenseRows([cache], [position], [0])
    state = model.prelude(torch.tensor([token]), rows)
    survival, margin, loop = torch.tensor(1.0), 1.0, 0
    while loop < limit:
        rows.depths = torch.tensor([loop])
        state, gate = model.loop(state, rows)
        loop += 1
        if gate is not None:
            survival = survival * (1 - torch.sigmoid(gate[0]))
        if threshold < 1 and min_loops <= loop < limit:
            margin = min(margin, abs(1 - survival.item() - threshold))
            if 1 - survival >= threshold:
                break
    cache.last[position] = loop - 1
    return model.coda(state, rows), loop, margin
