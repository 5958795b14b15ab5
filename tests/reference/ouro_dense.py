"""Ouro without a cache: whole sequences, every depth, and generation under serving semantics. Imports no engine code.

Serving semantics: prompt tokens run every loop; a generated token leaves by the gate's rule; a query at loop d reads,
of a token that left after loop e, the K and V of loop min(d, e).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.dense_math import Config, Weights, causal_attention, gated_mlp, norm, rotate_halves


@dataclass
class Depth:
    """After one loop: the normed state [T, H] and the gate's logits [T]."""

    state: Tensor
    gate: Tensor


def run(config: Config, w: Weights, ids: list[int], exits: list[int] | None = None) -> list[Depth]:
    """Every loop over `ids`; `exits` gives the loops each token ran (all, if omitted) for what others read of it."""
    loops = config["total_ut_steps"]
    last = torch.tensor(exits if exits is not None else [loops] * len(ids))
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    h = w["model.embed_tokens.weight"][ids]
    depths = []
    for loop in range(1, loops + 1):
        for layer in range(config["num_hidden_layers"]):
            h = _layer(config, w, h, layer, kept, last >= loop)
        h = norm(h, w["model.norm.weight"], config["rms_norm_eps"])
        gate = h @ w["model.early_exit_gate.weight"][0] + w["model.early_exit_gate.bias"][0]
        depths.append(Depth(h, gate))
    return depths


def logits(w: Weights, state: Tensor) -> Tensor:
    return state @ w["lm_head.weight"].T


@dataclass
class Served:
    ids: list[int]
    exit_depths: list[int]


def generate(
    config: Config, w: Weights, prompt: list[int], *, count: int, threshold: float, min_loops: int, max_loops: int
) -> Served:
    """Greedy text of `count` tokens; exit_depths[i] is the loops run by the token whose state gave ids[i]."""
    loops = config["total_ut_steps"]
    exits = [loops] * len(prompt)
    served = Served([logits(w, run(config, w, prompt)[-1].state[-1]).argmax().item()], [loops])
    while len(served.ids) < count:
        ids = prompt + served.ids
        depths = run(config, w, ids, [*exits, loops])
        left = exit_depth([depth.gate[-1].item() for depth in depths], threshold, min_loops, max_loops)
        exits.append(left)
        served.exit_depths.append(left)
        served.ids.append(logits(w, depths[left - 1].state[-1]).argmax().item())
    return served


def exit_depth(gates: list[float], threshold: float, min_loops: int, max_loops: int) -> int:
    survival = torch.tensor(1.0)
    for loop, gate in enumerate(gates, start=1):
        survival = survival * (1 - torch.sigmoid(torch.tensor(gate)))
        if loop == max_loops or (threshold < 1 and loop >= min_loops and 1 - survival >= threshold):
            return loop
    return len(gates)


def _layer(
    config: Config, w: Weights, h: Tensor, layer: int, kept: dict[int, tuple[Tensor, Tensor]], running: Tensor
) -> Tensor:
    p, eps, count = f"model.layers.{layer}.", config["rms_norm_eps"], len(h)
    x = norm(h, w[p + "input_layernorm.weight"], eps)
    q, k, v = (
        (x @ w[f"{p}self_attn.{name}_proj.weight"].T).view(count, -1, config["head_dim"]) for name in ("q", "k", "v")
    )
    q, k = rotate_halves(q, config["rope_theta"]), rotate_halves(k, config["rope_theta"])
    if layer in kept:
        k, v = (torch.where(running[:, None, None], new, old) for new, old in zip((k, v), kept[layer], strict=True))
    kept[layer] = (k, v)
    out = causal_attention(q, k, v) @ w[p + "self_attn.o_proj.weight"].T
    h = h + norm(out, w[p + "input_layernorm_2.weight"], eps)
    x = norm(h, w[p + "post_attention_layernorm.weight"], eps)
    out = gated_mlp(x, *(w[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return h + norm(out, w[p + "post_attention_layernorm_2.weight"], eps)
