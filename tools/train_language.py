"""The language-model stages: what a step minimises for each architecture, and the loop around it.

Owns losses and random depths. Must not know what happens to the model afterwards.

Ouro: expected loss over loop depths with an entropy reward (arXiv 2510.25741). In late steps half of the batches are
"exit-aware": tokens leave at random loops and later loops attend to the keys and values of the last loop each token
ran, which is what serving does.
Huginn: a random number of loops per step, gradients through the last few (arXiv 2502.05171).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epicycle.tools.train_blocks import KeysValues
from epicycle.tools.train_huginn import HuginnModel
from epicycle.tools.train_journal import Stage, Ticker
from epicycle.tools.train_optim import Optimiser, trapezoid
from epicycle.tools.train_ouro import OuroModel, exit_log_probabilities
from epicycle.tools.train_recipe import Recipe
from epicycle.tools.train_run import Run

OURO_WARM_SHARE, HUGINN_WARM_SHARE = 0.02, 0.04
# Steps that are exit-aware whatever the progress, so that both forms are compiled before the clock counts.
REHEARSALS = (2, 3)
# Progress at which the depth weights begin to follow the gate, and at which they have arrived.
HANDOVER = (0.15, 0.5)
# Spread of the log-normal rate that Huginn's loop count is drawn around.
RATE_SIGMA = 0.5


def train_ouro_language(run: Run, model: OuroModel) -> dict[str, Any]:
    """Train weights and gate together until the stage ends. Mutates the model; returns steps and tokens."""
    recipe = run.recipe
    optimiser = Optimiser(model, recipe.adam_lr, recipe.muon_lr, recipe.muon_decay)
    stage = Stage(run.journal, run.end_s(recipe.lm_share), recipe.max_steps, recipe.warm_steps)
    ticker = Ticker(run.journal, recipe.log_every_s)
    dice = np.random.default_rng(recipe.seed)
    prior = depth_prior(recipe, run.device)
    while stage.is_open():
        progress = stage.progress()
        optimiser.set_scale(trapezoid(progress, OURO_WARM_SHARE, recipe.cooldown_share))
        ids, targets = run.corpus.draw(recipe.batch_rows, recipe.context_tokens)
        with run.precision():
            if _is_exit_aware(recipe, stage.steps, progress, dice.random()):
                loss, by_depth = exit_aware_loss(model, ids, targets, prior)
            else:
                loss, by_depth = expected_loss(model, ids, targets, prior, recipe, progress)
        norm = optimiser.step(loss)
        stage.count_step()
        if ticker.is_due():
            depths = {f"loss@{loop}": value for loop, value in enumerate(by_depth.tolist(), start=1)}
            ticker.say(f"step {stage.steps}, {progress:.1%}", {**depths, "gradient": norm.item()})
    return _finish(run, stage)


def _is_exit_aware(recipe: Recipe, step: int, progress: float, roll: float) -> bool:
    if recipe.exit_aware_share == 0:
        return False
    return step in REHEARSALS or (progress > recipe.exit_aware_from and roll < recipe.exit_aware_share)


def depth_prior(recipe: Recipe, device: torch.device) -> Tensor:
    """Fixed weight of each loop [T, 1, 1]: growing, so that the last loop becomes the best one."""
    weights = recipe.prior_base ** torch.arange(1, recipe.loops + 1, device=device, dtype=torch.float32)
    return (weights / weights.sum())[:, None, None]


def prior_share(recipe: Recipe, progress: float) -> float:
    """Share of the fixed weights: 1, then falling over the hand-over, then what the recipe says."""
    begin, end = HANDOVER
    done = min(1.0, max(0.0, (progress - begin) / (end - begin)))
    return 1.0 - done * (1.0 - recipe.prior_share)


def expected_loss(
    model: OuroModel, ids: Tensor, targets: Tensor, prior: Tensor, recipe: Recipe, progress: float
) -> tuple[Tensor, Tensor]:
    """(scalar to minimise, mean loss per depth [T]): loss under exit distribution and prior, less the entropy."""
    states, losses, gates = model.embed(ids), [], []
    for _ in range(model.shape.loops):
        states, _ = model.loop(states)
        losses.append(model.token_loss(states, model.lm_head.weight, targets))
        gates.append(model.gate_logits(states))
    by_depth = torch.stack(losses)
    log_exit = exit_log_probabilities(torch.stack(gates))
    leave = log_exit.exp()
    share = prior_share(recipe, progress)
    weights = (1 - share) * leave + share * prior
    reward = recipe.entropy_weight * (1.0 if progress < 0.5 else 0.5)
    entropy = -(leave * log_exit).sum(0).mean()
    return (weights * by_depth).sum(0).mean() - reward * entropy, by_depth.detach().mean((1, 2))


def exit_aware_loss(model: OuroModel, ids: Tensor, targets: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """As `expected_loss`, with tokens leaving at random; a token's loss counts at the loops it really ran."""
    loops = model.shape.loops
    states, losses, ran = model.embed(ids), [], []
    running = torch.ones_like(ids, dtype=torch.bool)
    caches: list[KeysValues] | None = None
    for loop in range(loops):
        states, caches = model.loop(states, None if loop == 0 else running, caches)
        losses.append(model.token_loss(states, model.lm_head.weight, targets))
        ran.append(running)
        running = running & ~_leaves_at_random(model, states, loops - loop)
    by_depth = torch.stack(losses)
    weights = torch.stack(ran) * prior
    weights = weights / weights.sum(0, keepdim=True)
    return (weights * by_depth).sum(0).mean(), by_depth.detach().mean((1, 2))


def _leaves_at_random(model: OuroModel, states: Tensor, loops_left: int) -> Tensor:
    """Half by the gate's own odds, half uniformly over the loops left."""
    with torch.no_grad():
        odds = 0.5 * torch.sigmoid(model.gate_logits(states)) + 0.5 / loops_left
        return torch.rand_like(odds) < odds


def train_huginn_language(run: Run, model: HuginnModel) -> dict[str, Any]:
    """Train with random loop counts until the stage ends. Mutates the model; returns steps and tokens."""
    recipe = run.recipe
    optimiser = Optimiser(model, recipe.adam_lr, recipe.muon_lr, recipe.muon_decay)
    stage = Stage(run.journal, run.end_s(recipe.huginn_share), recipe.max_steps, recipe.warm_steps)
    ticker = Ticker(run.journal, recipe.log_every_s)
    dice = np.random.default_rng(recipe.seed)
    while stage.is_open():
        progress = stage.progress()
        optimiser.set_scale(trapezoid(progress, HUGINN_WARM_SHARE, recipe.cooldown_share))
        loops = random_loops(dice, recipe)
        traced = min(loops, recipe.traced_loops)
        ids, targets = run.corpus.draw(recipe.batch_rows, recipe.context_tokens)
        with run.precision():
            states = model.training_state(ids, loops - traced, traced)
            loss = model.token_loss(states, model.head, targets).mean()
        norm = optimiser.step(loss)
        stage.count_step()
        if ticker.is_due():
            figures = {"loss": loss.item(), "loops": float(loops), "gradient": norm.item()}
            ticker.say(f"step {stage.steps}, {progress:.1%}", figures)
    return _finish(run, stage)


def random_loops(dice: np.random.Generator, recipe: Recipe) -> int:
    """Poisson around a log-normal rate whose mean is `mean_loops`, at least one, at most `max_train_loops`."""
    rate = dice.lognormal(math.log(recipe.mean_loops) - RATE_SIGMA**2 / 2, RATE_SIGMA)
    return min(int(dice.poisson(rate)) + 1, recipe.max_train_loops)


def _finish(run: Run, stage: Stage) -> dict[str, Any]:
    tokens = stage.steps * run.recipe.batch_rows * run.recipe.context_tokens
    run.journal.say(f"language model: {stage.steps} steps, {tokens:,} tokens")
    return {"steps": stage.steps, "tokens": tokens}
