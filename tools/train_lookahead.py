"""The lookahead stage: a small head that guesses a token's coming gate logits before they are computed.

Owns the head, its distillation and its score. It reads the state before a loop and the leaving state of the previous
token; the scheduler uses the guess to plan depths, never to decide an exit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epicycle.tools.train_journal import Stage
from epicycle.tools.train_optim import falling
from epicycle.tools.train_ouro import Decoded, ExitRule, OuroModel, decode
from epicycle.tools.train_run import Run

WIDTH = 64
THRESHOLDS = (0.5, 0.7, 0.9)
HELD_OUT_TOKENS = 512
LOG_EVERY_STEPS = 100


class LookaheadHead(nn.Module):
    """State before a loop and the previous token's leaving state -> gate logits of loops 1..T."""

    def __init__(self, hidden_size: int, loops: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * hidden_size, WIDTH)
        self.step_embed = nn.Embedding(loops, WIDTH)
        self.fc2 = nn.Linear(WIDTH, loops)
        self.in_scale = nn.Parameter(torch.ones(2))  # embeddings and normed states differ in size
        nn.init.zeros_(self.step_embed.weight)

    def forward(self, state: Tensor, previous: Tensor, loop: int) -> Tensor:
        """[B, S, H] twice and the 0-based loop about to run -> [B, S, T] float32."""
        scaled = (state.float() * self.in_scale[0], previous.float() * self.in_scale[1])
        inner = self.fc1(torch.cat(scaled, dim=-1)) + self.step_embed.weight[loop]
        out: Tensor = self.fc2(F.silu(inner))
        return out


def previous_token(states: Tensor) -> Tensor:
    """Shift [B, S, H] by one position; the first token sees zeros."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def train_lookahead(run: Run, model: OuroModel) -> tuple[LookaheadHead, int]:
    """(head rounded to bfloat16 values, steps). The model is frozen and unchanged."""
    recipe = run.recipe
    head = LookaheadHead(model.shape.hidden_size, model.shape.loops).to(run.device)
    adam = torch.optim.AdamW(head.parameters(), lr=recipe.lookahead_lr, weight_decay=0.0)
    stage = Stage(run.journal, run.end_s(recipe.lookahead_share), recipe.max_steps)
    while stage.is_open():
        adam.param_groups[0]["lr"] = recipe.lookahead_lr * falling(stage.progress(), floor=0.03)
        loss = _distillation_loss(run, model, head)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        stage.count_step()
        if stage.steps % LOG_EVERY_STEPS == 0:
            run.journal.say(f"lookahead step {stage.steps}: loss {loss.item():.4f}")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return head.requires_grad_(False), stage.steps


def _distillation_loss(run: Run, model: OuroModel, head: LookaheadHead) -> Tensor:
    """Cross-entropy of the guessed against the real exit odds, from every loop towards all later ones."""
    ids, _ = run.corpus.draw(max(2, run.recipe.batch_rows // 2), run.recipe.context_tokens)
    with torch.no_grad(), run.precision():
        states = [model.embed(ids), *model.all_depths(ids)]
        odds = torch.stack([torch.sigmoid(model.gate_logits(state)) for state in states[1:-1]], dim=-1)
        previous = previous_token(states[-1])
    last = model.shape.loops - 1
    losses = [
        F.binary_cross_entropy_with_logits(head(states[loop], previous, loop)[..., loop:last], odds[..., loop:])
        for loop in range(last)
    ]
    return torch.stack(losses).sum()


@dataclass(slots=True)
class _Score:
    exact: int = 0
    near: int = 0
    tokens: int = 0
    ahead_right: int = 0
    ahead_asked: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "depth_exact": round(self.exact / self.tokens, 4),
            "depth_within_1": round(self.near / self.tokens, 4),
            "one_loop_ahead": round(self.ahead_right / max(1, self.ahead_asked), 4),
        }


@torch.no_grad()
def lookahead_quality(run: Run, model: OuroModel, head: LookaheadHead) -> dict[str, dict[str, float]]:
    """Per threshold: how often the depth is guessed before loop 1, and "leaves after the next loop" one ahead."""
    report = {}
    tokens = min(run.recipe.context_tokens, HELD_OUT_TOKENS)
    for threshold in THRESHOLDS:
        score = _Score()
        for name in run.corpus.names:
            for ids, _ in run.corpus.held_out_batches(name, tokens, run.recipe.eval_rows, run.recipe.eval_tokens):
                with run.precision():
                    decoded = decode(model, ids, ExitRule(threshold, 1, model.shape.loops))
                    _score_first_guess(score, head, decoded, threshold)
                    _score_one_ahead(score, model, head, decoded, threshold)
        report[str(threshold)] = score.figures()
        run.journal.say(f"lookahead at threshold {threshold}: {report[str(threshold)]}")
    return report


def _score_first_guess(score: _Score, head: LookaheadHead, decoded: Decoded, threshold: float) -> None:
    guess = torch.sigmoid(head(decoded.before[0][0], previous_token(decoded.state), 0).float())
    left = 1 - torch.cumprod(1 - guess[..., :-1], dim=-1) >= threshold
    depth = torch.where(left.any(-1), left.float().argmax(-1) + 1, guess.shape[-1])
    score.exact += int((depth == decoded.depth).sum())
    score.near += int(((depth - decoded.depth).abs() <= 1).sum())
    score.tokens += depth.numel()


def _score_one_ahead(score: _Score, model: OuroModel, head: LookaheadHead, decoded: Decoded, threshold: float) -> None:
    previous = previous_token(decoded.state)
    survival = torch.ones(decoded.depth.shape, device=decoded.depth.device)
    for loop in range(model.shape.loops - 1):
        state, running = decoded.before[loop]
        guess = torch.sigmoid(head(state, previous, loop).float())[..., loop]
        says_leave = 1 - survival * (1 - guess) >= threshold
        score.ahead_right += int(((says_leave == (decoded.depth == loop + 1)) & running).sum())
        score.ahead_asked += int(running.sum())
        survival = survival * (1 - torch.sigmoid(model.gate_logits(decoded.before[loop + 1][0])))
