"""Nanbeige's config and tensor names (`model_type` "nanbeige"): what is read, ignored and refused.

Torch-free. Query width (heads x head_dim) is not hidden_size here, so head_dim must be given.
"""

from __future__ import annotations

from epicycle.engine.models.fields import COMMON_IGNORED, Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import Shape, TensorPlan, llama_layer

# Switches of the published class that change the arithmetic; we have none of them.
_VARIANTS = (
    "attention_bias",
    "attention_dropout",
    "emb_neighbor_num",
    "enable_depth_attention",
    "enable_double_loop_split",
    "enable_h_res_identity",
    "enable_hyper_connection",
    "enable_mhc",
    "insert_ngram_layer_idx",
    "loop_loss_weights",
    "loop_middle_layers",
    "loop_share_kv",
    "mlp_bias",
    "ngram_insert_all_layers",
    "qk_layernorm",
    "rope_scaling",
    "sliding_window",
    "use_sliding_window",
)


def parse(fields: Fields) -> ModelSpec:
    """Raises `ConfigError` for anything that the plain looped block computed here doesn't mean."""
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.integer("head_dim", "kv_channels")
    if head_dim % 2:
        raise fields.refuse("head_dim", head_dim, "even: rotation works on halves")
    vocab = fields.integer("vocab_size")
    spec = ModelSpec(
        model_type="nanbeige",
        hidden_size=hidden,
        state_width=hidden,
        layers=layers,
        first_recurrent=0,
        recurrent_layers=layers,
        loops=fields.integer("num_loops", "total_ut_steps"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab,
        context_tokens=fields.integer("max_position_embeddings"),
        has_gate=False,
        has_costly_boundary=False,
        has_tied_head=False,
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=fields.number("rope_theta"),
        init_std=fields.number("initializer_range", default=0.02),
        eos_ids=fields.token_ids("eos_token_id", vocab),
        bos_id=fields.token_id("bos_token_id", vocab),
        pad_id=fields.token_id("pad_token_id", vocab),
    )
    _refuse_variants(fields, layers)
    return spec


def _refuse_variants(fields: Fields, layers: int) -> None:
    fields.expect("hidden_act", "silu")
    fields.expect("tie_word_embeddings", False)
    # Whether it drops every norm or only those between loops differs between published codes.
    fields.expect("skip_loop_final_norm", False, None)
    fields.expect_off(*_VARIANTS)
    fields.expect_full_attention(layers)
    fields.ignore(*COMMON_IGNORED, "max_window_layers", "pretraining_tp")
    fields.finish()


def tensors(spec: ModelSpec) -> TensorPlan:
    hidden = spec.hidden_size
    required: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    for index in range(spec.layers):
        prefix = f"model.layers.{index}"
        required |= llama_layer(prefix, hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size)
        required[f"{prefix}.input_layernorm.weight"] = (hidden,)
        required[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return TensorPlan(required)
