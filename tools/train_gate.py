"""The exit-gate stage: with the language model frozen, teach the gate when another loop would not pay.

Owns the target and its price. The target compares beliefs, not luck: how far is the prediction after loop t from the
one after the last loop (KL, in nats), and would any later loop bring it closer by more than a price per loop? The
measured loss of the real next token asks the same but is mostly noise where the text was free to go on many ways.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epicycle.tools.train_blocks import head_logits
from epicycle.tools.train_journal import Stage
from epicycle.tools.train_optim import falling
from epicycle.tools.train_ouro import OuroModel
from epicycle.tools.train_run import Run

PRICES_NATS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)
SURVEY_BATCHES = 4
# The target's steepness is this over the price, within bounds: a price away from the border is a clear decision.
SLOPE_TIMES_PRICE, SLOPE_BOUNDS = 5.0, (25.0, 500.0)
LOG_EVERY_STEPS = 100


def train_gate(run: Run, model: OuroModel) -> dict[str, Any]:
    """Train the gate until the stage ends. Mutates only the gate; returns what the report keeps."""
    recipe = run.recipe
    price = recipe.loop_price or pick_price(run, model)
    slope = recipe.gate_slope or min(max(SLOPE_TIMES_PRICE / price, SLOPE_BOUNDS[0]), SLOPE_BOUNDS[1])
    gate = model.model.early_exit_gate.requires_grad_(True)
    adam = torch.optim.AdamW(gate.parameters(), lr=recipe.gate_lr, weight_decay=0.0)
    stage = Stage(run.journal, run.end_s(recipe.gate_share), recipe.max_steps)
    while stage.is_open():
        adam.param_groups[0]["lr"] = recipe.gate_lr * falling(stage.progress(), floor=0.05)
        states, distance = survey(run, model)
        leave = torch.stack([model.gate_logits(state) for state in states[:-1]])
        # The negated gate logit is the logit of going on.
        loss = F.binary_cross_entropy_with_logits(-leave, pays_to_go_on(distance, price, slope))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        stage.count_step()
        if stage.steps % LOG_EVERY_STEPS == 0:
            run.journal.say(f"gate step {stage.steps}: loss {loss.item():.4f}")
    gate.requires_grad_(False)
    return {"steps": stage.steps, "price_per_loop": price, "k": slope, "target": "kl"}


@torch.no_grad()
def survey(run: Run, model: OuroModel) -> tuple[list[Tensor], Tensor]:
    """(states after each loop, distance [T, B, S]): KL from the last loop's belief to each loop's, in nats."""
    ids, _ = run.corpus.draw(max(2, run.recipe.batch_rows // 2), run.recipe.context_tokens)
    with run.precision():
        states = model.all_depths(ids)
        beliefs = [F.log_softmax(head_logits(state, model.lm_head.weight), dim=-1) for state in states]
    truth = beliefs[-1]
    return states, torch.stack([(truth.exp() * (truth - belief)).sum(-1) for belief in beliefs])


def pays_to_go_on(distance: Tensor, price: float, slope: float) -> Tensor:
    """Soft target [T - 1, ...] of going on after each loop: does the best later loop save more than it costs?"""
    loops = len(distance)
    targets = []
    for here in range(loops - 1):
        later = torch.stack([distance[there] + price * (there - here) for there in range(here + 1, loops)])
        targets.append(torch.sigmoid(slope * (distance[here] - later.amin(0))))
    return torch.stack(targets)


def hindsight_depth(distance: Tensor, price: float) -> Tensor:
    """Loops each token would run if it stopped at the first loop after which going on doesn't pay."""
    stops = pays_to_go_on(distance, price, slope=1.0) < 0.5
    first = stops.float().argmax(0) + 1
    return torch.where(stops.any(0), first, len(distance))


def pick_price(run: Run, model: OuroModel) -> float:
    """The price whose mean hindsight depth comes nearest to `target_depth` on fresh batches."""
    distance = torch.cat([survey(run, model)[1].flatten(1) for _ in range(SURVEY_BATCHES)], dim=1)
    depths = {price: hindsight_depth(distance, price).float().mean().item() for price in PRICES_NATS}
    price = min(depths, key=lambda candidate: abs(depths[candidate] - run.recipe.target_depth))
    run.journal.say(f"price of a loop: {price} nats (mean depth in hindsight {depths[price]:.2f})")
    return price
