"""Score token windows with an Ouro-style checkpoint under serving semantics, without the engine.

Owns reading a checkpoint folder into the training model and the dense equivalent of adaptive decoding over it. The
first token of a window is its prompt (full depth); every other one leaves by the rule with min_loops 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from epicycle.tools.train_blocks import token_loss
from epicycle.tools.train_ouro import ExitRule, OuroModel, OuroShape, decode

BATCH_ROWS = 8


@dataclass(frozen=True, slots=True)
class Score:
    """Means over all scored tokens; `leaves[k]` is the share of tokens that left after loop k + 1."""

    threshold: float
    tokens: int
    mean_loops: float
    loss_nats: float
    leaves: tuple[float, ...]


def load_model(folder: Path) -> OuroModel:
    """The checkpoint in float32. Raises FileNotFoundError, KeyError or RuntimeError when files don't fit."""
    config = json.loads((folder / "config.json").read_text())
    shape = OuroShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        loops=config["total_ut_steps"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = OuroModel(shape)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.requires_grad_(False)


@torch.no_grad()
def score(model_folder: Path, ids: NDArray[np.uint16], threshold: float) -> Score:
    """Loops per token and loss in nats per token over windows ids [rows, tokens]; each token predicts the next."""
    model = load_model(model_folder)
    loops = model.shape.loops
    leaves, loss, tokens = torch.zeros(loops), 0.0, 0
    for rows in torch.split(torch.from_numpy(ids.astype(np.int64)), BATCH_ROWS):
        inputs, targets = rows[:, :-1], rows[:, 1:]
        floor = torch.ones_like(inputs)
        floor[:, 0] = loops
        decoded = decode(model, inputs, ExitRule(threshold, floor, loops))
        loss += token_loss(decoded.state, model.lm_head.weight, targets)[:, 1:].sum().item()
        depths = decoded.depth[:, 1:].flatten()
        leaves += torch.bincount(depths - 1, minlength=loops)
        tokens += depths.numel()
    shares = leaves / tokens
    mean_loops = (shares * torch.arange(1, loops + 1)).sum().item()
    return Score(threshold, tokens, mean_loops, loss / tokens, tuple(shares.tolist()))
