"""Tiny random models of each architecture, with weights lively enough that a wrong operation shows."""

from __future__ import annotations

from math import sqrt
from zlib import crc32

import torch
from torch import Tensor

from epicycle.engine.models.fields import Fields
from epicycle.engine.models.registry import architecture
from epicycle.engine.models.spec import ModelSpec

OURO = {
    "model_type": "ouro",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "total_ut_steps": 4,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
HUGINN = {
    "model_type": "huginn_raven",
    "vocab_size": 61,
    "n_embd": 32,
    "n_heads": 2,
    "intermediate_size": 48,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "n_layers": 5,
    "mean_recurrence": 5,
    "block_size": 64,
    "rope_base": 500,
    "norm_eps": 1e-6,
    "qk_bias": True,
    "bias": False,
    "tie_embeddings": True,
    "eos_token_id": 2,
}
NANBEIGE = {
    "model_type": "nanbeige",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 700.0,
    "num_loops": 4,
    "total_ut_steps": 4,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
CONFIGS = {"ouro": OURO, "huginn_raven": HUGINN, "nanbeige": NANBEIGE}


def spec_of(config: dict[str, object]) -> ModelSpec:
    return architecture(config["model_type"]).parse(Fields(config, "config.json"))


def lively_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """float32 weights by public name: matrices keep variance, norms lie around one, biases are not zero."""
    weights = {}
    for name, shape in architecture(spec.model_type).tensors(spec).required.items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + crc32(name.encode())))
        is_norm = len(shape) == 1 and not name.endswith("bias")
        weights[name] = 1 + 0.2 * noise if is_norm else 0.7 * noise / sqrt(shape[-1])
    return weights
