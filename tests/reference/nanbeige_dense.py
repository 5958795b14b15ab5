"""Nanbeige without a cache: whole sequences at every depth. Imports no engine code."""

from __future__ import annotations

from torch import Tensor

from tests.reference.dense_math import Config, Weights, causal_attention, gated_mlp, norm, rotate_halves


def run(config: Config, w: Weights, ids: list[int]) -> list[Tensor]:
    """The normed state [T, H] after each loop."""
    h = w["model.embed_tokens.weight"][ids]
    states = []
    for _ in range(config["num_loops"]):
        for layer in range(config["num_hidden_layers"]):
            h = _layer(config, w, h, f"model.layers.{layer}.")
        h = norm(h, w["model.norm.weight"], config["rms_norm_eps"])
        states.append(h)
    return states


def logits(w: Weights, state: Tensor) -> Tensor:
    return state @ w["lm_head.weight"].T


def _layer(config: Config, w: Weights, h: Tensor, p: str) -> Tensor:
    eps, theta, width = config["rms_norm_eps"], config["rope_theta"], config["kv_channels"]
    x = norm(h, w[p + "input_layernorm.weight"], eps)
    q, k, v = ((x @ w[f"{p}self_attn.{name}_proj.weight"].T).view(len(h), -1, width) for name in ("q", "k", "v"))
    mixed = causal_attention(rotate_halves(q, theta), rotate_halves(k, theta), v)
    h = h + mixed @ w[p + "self_attn.o_proj.weight"].T
    x = norm(h, w[p + "post_attention_layernorm.weight"], eps)
    return h + gated_mlp(x, *(w[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
