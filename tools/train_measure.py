"""Held-out figures of a trained model: loss per depth, and depth and loss under early exit.

Owns the shape of these parts of report.json. Reads models, never changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from epicycle.tools.train_blocks import token_loss
from epicycle.tools.train_huginn import HuginnModel
from epicycle.tools.train_ouro import ExitRule, OuroModel, decode
from epicycle.tools.train_run import Run

THRESHOLDS = (0.5, 0.7, 0.9)
HELD_OUT_TOKENS = 512
HUGINN_LOOPS = (1, 2, 4, 8, 12, 16, 24, 32)
DIVERGENCES_NATS = (5e-2, 5e-3, 5e-4)
SETTLE_LOOPS, SETTLE_TOKENS = 16, 2048


@torch.no_grad()
def measure_ouro(run: Run, model: OuroModel, label: str) -> dict[str, Any]:
    """{"depth_loss": per source and mix, "exit": per threshold}; losses in nats per token."""
    with run.precision():
        by_depth = {name: _depth_losses(run, model, name) for name in run.corpus.names}
        exits = {str(threshold): _exit_figures(run, model, threshold) for threshold in THRESHOLDS}
    mix = sum(share * by_depth[name] for name, share in _shares(run))
    assert isinstance(mix, Tensor)
    run.journal.say(f"{label}: held-out loss per depth {_rounded(mix, 4)}")
    for threshold, figures in exits.items():
        run.journal.say(f"{label}: threshold {threshold} runs {figures['mean_depth']} loops at {figures['loss']}")
    losses = {name: _rounded(values, 4) for name, values in by_depth.items()}
    return {"depth_loss": {**losses, "mix": _rounded(mix, 4)}, "exit": exits}


def _depth_losses(run: Run, model: OuroModel, name: str) -> Tensor:
    total, tokens = torch.zeros(model.shape.loops, dtype=torch.float64), 0
    for ids, targets in _held_out(run, name):
        losses = [token_loss(state, model.lm_head.weight, targets).sum().item() for state in model.all_depths(ids)]
        total += torch.tensor(losses, dtype=torch.float64)
        tokens += targets.numel()
    return total / tokens


def _exit_figures(run: Run, model: OuroModel, threshold: float) -> dict[str, Any]:
    sources = {name: _source_exits(run, model, name, threshold) for name in run.corpus.names}
    histogram = torch.stack([share * sources[name][0] for name, share in _shares(run)]).sum(0)
    loss = sum(share * sources[name][1] for name, share in _shares(run))
    per_source = {name: _exit_entry(*figures) for name, figures in sources.items()}
    return {**_exit_entry(histogram, loss), "per_source": per_source}


def _source_exits(run: Run, model: OuroModel, name: str, threshold: float) -> tuple[Tensor, float]:
    """(share of tokens leaving after each loop [T], loss in nats per token)."""
    rule = ExitRule(threshold, 1, model.shape.loops)
    counts, loss = torch.zeros(model.shape.loops, dtype=torch.float64), 0.0
    for ids, targets in _held_out(run, name):
        decoded = decode(model, ids, rule)
        counts += torch.bincount(decoded.depth.flatten() - 1, minlength=model.shape.loops).cpu()
        loss += token_loss(decoded.state, model.lm_head.weight, targets).sum().item()
    tokens = counts.sum().item()
    return counts / tokens, loss / tokens


def _exit_entry(histogram: Tensor, loss: float) -> dict[str, Any]:
    mean = (histogram * torch.arange(1, len(histogram) + 1)).sum().item()
    return {"hist": _rounded(histogram, 3), "mean_depth": round(mean, 3), "loss": round(loss, 4)}


@torch.no_grad()
def measure_huginn(run: Run, model: HuginnModel) -> dict[str, Any]:
    """{"loss_at_r": per source and loop count, "kl_exit": per divergence}; losses in nats per token."""
    loops = tuple(count for count in HUGINN_LOOPS if count <= run.recipe.max_train_loops)
    report: dict[str, Any] = {"loss_at_r": {}, "kl_exit": {}}
    with run.precision():
        for name in run.corpus.names:
            losses = _loop_losses(run, model, name, loops)
            report["loss_at_r"][name] = dict(zip(map(str, loops), losses, strict=True))
            run.journal.say(f"held-out loss of {name}: {report['loss_at_r'][name]}")
        for divergence in DIVERGENCES_NATS:
            figures = _settle_figures(run, model, divergence)
            report["kl_exit"][str(divergence)] = figures
            run.journal.say(f"settled within {divergence} nats: {figures['mean']} loops at {figures['loss']}")
    return report


def _loop_losses(run: Run, model: HuginnModel, name: str, loops: tuple[int, ...]) -> list[float]:
    total, tokens = torch.zeros(len(loops), dtype=torch.float64), 0
    for ids, targets in _held_out(run, name):
        states = model.states_after(ids, loops)
        losses = [token_loss(state, model.head, targets).sum().item() for state in states]
        total += torch.tensor(losses, dtype=torch.float64)
        tokens += targets.numel()
    return _rounded(total / tokens, 4)


def _settle_figures(run: Run, model: HuginnModel, divergence: float) -> dict[str, Any]:
    most = min(run.recipe.max_train_loops, SETTLE_LOOPS)
    counts, loss = torch.zeros(most + 1, dtype=torch.float64), 0.0
    width, budget = min(run.recipe.context_tokens, HELD_OUT_TOKENS // 2), min(run.recipe.eval_tokens, SETTLE_TOKENS)
    for name in run.corpus.names:
        for ids, targets in run.corpus.held_out_batches(name, width, 8, budget):
            states, loops = model.settle(ids, divergence, most)
            counts += torch.bincount(loops.flatten(), minlength=most + 1).cpu()
            loss += token_loss(states, model.head, targets).sum().item()
    tokens = counts.sum().item()
    mean = (counts * torch.arange(most + 1)).sum().item() / tokens
    return {"hist": _rounded(counts / tokens, 3), "mean": round(mean, 3), "loss": round(loss / tokens, 4)}


def _held_out(run: Run, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    tokens = min(run.recipe.context_tokens, HELD_OUT_TOKENS)
    return run.corpus.held_out_batches(name, tokens, run.recipe.eval_rows, run.recipe.eval_tokens)


def _shares(run: Run) -> list[tuple[str, float]]:
    """Sources with their shares of the mix, summing to one."""
    shares: list[float] = (run.corpus.shares / run.corpus.shares.sum()).tolist()
    return list(zip(run.corpus.names, shares, strict=True))


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
