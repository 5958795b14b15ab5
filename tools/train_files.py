"""The files of a checkpoint folder, in the layout and with the names of the public checkpoints.

Owns formats and key names. Must not know how the numbers were made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from epicycle.tools.train_huginn import NORM_EPS, ROPE_BASE, HuginnShape
from epicycle.tools.train_ouro import OuroShape
from epicycle.tools.train_recipe import Recipe

END_OF_TEXT, END_OF_TURN = 0, 2
SPECIAL_IDS = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TURN, "pad_token_id": END_OF_TEXT}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")


def save_tensors(module: nn.Module, path: Path) -> None:
    """Every tensor of the module's state in bfloat16, under its own name."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in module.state_dict().items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """The recipe for the report, without paths of the machine it ran on."""
    return {name: value for name, value in asdict(recipe).items() if name not in ("corpus", "out")}


def copy_tokenizer(corpus: Path, out: Path, context_tokens: int) -> None:
    """tokenizer.json as it is, and the tokenizer_config.json that goes with it."""
    (out / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    save_json(out / "tokenizer_config.json", config, indent=2)


def save_ouro_config(out: Path, shape: OuroShape, context_tokens: int) -> None:
    """config.json and generation_config.json; the latter carries the exit rule that serving starts from."""
    config = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "total_ut_steps": shape.loops,
        "early_exit_threshold": 1.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "initializer_range": 0.02,
        **SPECIAL_IDS,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    save_json(out / "config.json", config, indent=2)
    _save_generation_config(out, {"exit_threshold": 0.7, "min_loops": 1})


def save_huginn_config(out: Path, shape: HuginnShape, recipe: Recipe) -> None:
    """config.json and generation_config.json."""
    config = {
        "architectures": ["RavenForCausalLM"],
        "model_type": "huginn_raven",
        "architecture_class_name": "RecurrentGPT",
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.vocab_size,
        "n_embd": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "n_layers_in_prelude": shape.prelude_layers,
        "n_layers_in_recurrent_block": shape.core_layers,
        "n_layers_in_coda": shape.coda_layers,
        "n_layers": shape.prelude_layers + shape.core_layers + shape.coda_layers,
        "mean_recurrence": shape.mean_loops,
        "mean_backprop_depth": recipe.traced_loops,
        "injection_type": "linear",
        "state_init": "like-init",
        "sampling_scheme": "poisson-lognormal-filling",
        "block_size": recipe.context_tokens,
        "rope_base": int(ROPE_BASE),
        "norm_eps": NORM_EPS,
        "qk_bias": True,
        "bias": False,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "test_time_noise": 0,
        "test_time_noise_type": "fixed",
        **SPECIAL_IDS,
        "torch_dtype": "bfloat16",
        "init_values": {
            "std": shape.init_std,
            "out_proj": shape.output_std,
            "embedding": shape.init_std,
            "embed_scale": shape.embed_scale,
        },
        "effective_expected_depth": shape.effective_depth,
    }
    save_json(out / "config.json", config, indent=2)
    _save_generation_config(out, {})


def _save_generation_config(out: Path, extra: Mapping[str, Any]) -> None:
    stops = {**SPECIAL_IDS, "eos_token_id": [END_OF_TURN, END_OF_TEXT], "do_sample": False}
    save_json(out / "generation_config.json", {**stops, **extra}, indent=1)
