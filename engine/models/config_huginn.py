"""Huginn's config and tensor names (`model_type` "huginn_raven"): what is read, ignored and refused.

Torch-free. Owns two facts that no file of the checkpoint states: how the initial spread follows from the width, and
the extra stop ids of the official generation code.
"""

from __future__ import annotations

from math import sqrt

from epicycle.engine.models.fields import COMMON_IGNORED, Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import Shape, TensorPlan

# By vocabulary size: begin of text and end of turn, at which the official generation code stops beside EOS.
_OFFICIAL_STOP_IDS = {65536: (65504, 65508)}

# Training and bookkeeping; no forward pass depends on them.
_IGNORED = (
    "activation_checkpoint_impl",
    "effective_expected_depth",
    "init_orthogonal",
    "init_strategy",
    "mean_backprop_depth",
    "padding_multiple",
    "sampling_scheme",
    "test_time_noise_type",
)


def parse(fields: Fields) -> ModelSpec:
    """Raises `ConfigError` for anything that the recurrent-depth model computed here doesn't mean."""
    hidden = fields.integer("n_embd")
    heads, head_dim = _head_shape(fields, hidden)
    prelude = fields.integer("n_layers_in_prelude", minimum=0)
    core = fields.integer("n_layers_in_recurrent_block")
    coda = fields.integer("n_layers_in_coda", minimum=0)
    vocab = fields.integer("vocab_size", "padded_vocab_size")
    init_std, embed_scale = _initial_spread(fields, hidden)
    spec = ModelSpec(
        model_type="huginn_raven",
        hidden_size=hidden,
        state_width=2 * hidden,
        layers=prelude + core + coda,
        first_recurrent=prelude,
        recurrent_layers=core,
        loops=fields.integer("mean_recurrence"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab,
        context_tokens=fields.integer("block_size"),
        has_gate=False,
        has_costly_boundary=True,
        has_tied_head=True,
        norm_eps=fields.number("norm_eps"),
        rope_theta=fields.number("rope_base"),
        init_std=init_std,
        embed_scale=embed_scale,
        eos_ids=(*fields.token_ids("eos_token_id", vocab), *_OFFICIAL_STOP_IDS.get(vocab, ())),
        bos_id=fields.token_id("bos_token_id", vocab),
        pad_id=fields.token_id("pad_token_id", vocab),
    )
    fields.expect("n_layers", spec.layers)
    _refuse_variants(fields)
    return spec


def _head_shape(fields: Fields, hidden: int) -> tuple[int, int]:
    """(heads, head_dim). Both spellings of the query-head count are accepted; kv heads must be equal."""
    heads = fields.integer("n_heads", "num_attention_heads", "num_key_value_heads")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if heads * head_dim != hidden:
        raise fields.refuse("head_dim", head_dim, f"n_embd {hidden} divided by {heads} heads")
    if head_dim % 2:
        raise fields.refuse("head_dim", head_dim, "even: rotation works on pairs")
    return heads, head_dim


def _initial_spread(fields: Fields, hidden: int) -> tuple[float, float]:
    """(std of weights and start state, embedding scale): as stored, else from the width."""
    stored = Fields(fields.table("init_values"), "config.json: init_values")
    std = stored.number("std", default=sqrt(2 / (5 * hidden)))
    scale = stored.number("embed_scale", default=sqrt(hidden))
    stored.ignore("embedding", "out_proj")
    stored.finish()
    return std, scale


def _refuse_variants(fields: Fields) -> None:
    fields.expect("architecture_class_name", "RecurrentGPT")
    fields.expect("block_class_name", "SandwichBlock")
    fields.expect("norm_class_name", "RMSNorm_llama")
    fields.expect("mlp_class_name", "GatedMLP")
    fields.expect("nonlin_name", "SiLU")
    fields.expect("injection_type", "linear")
    fields.expect("state_init", "like-init")
    fields.expect("qk_bias", True)
    fields.expect("tie_embeddings", True)
    fields.expect("tie_word_embeddings", True)
    fields.expect_off("bias", "test_time_noise")
    fields.ignore(*COMMON_IGNORED, *_IGNORED)
    fields.finish()


def block_names(spec: ModelSpec) -> list[str]:
    """Name prefixes of the blocks in the order of their KV layers: prelude, core, coda."""
    stages = (("prelude", spec.first_recurrent), ("core_block", spec.recurrent_layers), ("coda", spec.coda_layers))
    return [f"transformer.{stage}.{index}" for stage, count in stages for index in range(count)]


def tensors(spec: ModelSpec) -> TensorPlan:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    required: dict[str, Shape] = {
        "transformer.wte.weight": (spec.vocab_size, hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
    }
    for prefix in block_names(spec):
        required |= {f"{prefix}.norm_{index}.weight": (hidden,) for index in (1, 2, 3, 4)}
        required |= {
            f"{prefix}.attn.Wqkv.weight": (3 * hidden, hidden),
            f"{prefix}.attn.qk_bias": (2, 1, spec.heads, spec.head_dim),
            f"{prefix}.attn.proj.weight": (hidden, hidden),
            f"{prefix}.mlp.fc.weight": (2 * inner, hidden),
            f"{prefix}.mlp.proj.weight": (hidden, inner),
        }
    return TensorPlan(
        required,
        constants={"freqs_cis": (1, spec.context_tokens, 1, spec.head_dim // 2, 2)},
        tied={"lm_head.weight": "transformer.wte.weight"},
    )
