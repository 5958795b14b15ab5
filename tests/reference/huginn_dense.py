"""Huginn without a cache: whole sequences at every depth, from a given start state. Imports no engine code."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.dense_math import Config, Weights, causal_attention, gated_mlp, norm, rotate_neighbours


def run(config: Config, w: Weights, ids: list[int], start: Tensor | None = None) -> list[Tensor]:
    """LM-head input [T, H] after each recurrence, as if it were the last; `start` [T, H] is zero if omitted."""
    e = w["transformer.wte.weight"][ids] * config["n_embd"] ** 0.5
    for index in range(config["n_layers_in_prelude"]):
        e = _block(config, w, e, f"transformer.prelude.{index}.")
    s = torch.zeros_like(e) if start is None else start
    outputs = []
    for _ in range(config["mean_recurrence"]):
        s = torch.cat([s, e], -1) @ w["transformer.adapter.weight"].T
        for index in range(config["n_layers_in_recurrent_block"]):
            s = _block(config, w, s, f"transformer.core_block.{index}.")
        outputs.append(_coda(config, w, s))
    return outputs


def logits(w: Weights, x: Tensor) -> Tensor:
    return x @ w["transformer.wte.weight"].T


def _coda(config: Config, w: Weights, s: Tensor) -> Tensor:
    x = norm(s, w["transformer.ln_f.weight"], config["norm_eps"])
    for index in range(config["n_layers_in_coda"]):
        x = _block(config, w, x, f"transformer.coda.{index}.")
    return norm(x, w["transformer.ln_f.weight"], config["norm_eps"])


def _block(config: Config, w: Weights, x: Tensor, p: str) -> Tensor:
    eps = config["norm_eps"]
    mixed = _attention(config, w, norm(x, w[p + "norm_1.weight"], eps), p)
    x = norm(mixed + x, w[p + "norm_2.weight"], eps)
    gate, up = w[p + "mlp.fc.weight"].chunk(2)
    out = gated_mlp(norm(x, w[p + "norm_3.weight"], eps), gate, up, w[p + "mlp.proj.weight"])
    return norm(out + x, w[p + "norm_4.weight"], eps)


def _attention(config: Config, w: Weights, x: Tensor, p: str) -> Tensor:
    heads = config.get("n_heads", config.get("num_attention_heads"))
    q, k, v = ((x @ third.T).view(len(x), heads, -1) for third in w[p + "attn.Wqkv.weight"].chunk(3))
    q, k = (part + w[p + "attn.qk_bias"][index] for index, part in enumerate((q, k)))
    mixed = causal_attention(rotate_neighbours(q, config["rope_base"]), rotate_neighbours(k, config["rope_base"]), v)
    return mixed @ w[p + "attn.proj.weight"].T
