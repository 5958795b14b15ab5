"""Ouro's config and tensor names (`model_type` "ouro"): what is read, what is ignored, what is refused.

Torch-free. Every count comes from the file, so the larger siblings of Ouro-1.4B load the same way.
"""

from __future__ import annotations

from epicycle.engine.models.fields import COMMON_IGNORED, Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import Shape, TensorPlan, llama_layer

LAYER_NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def parse(fields: Fields) -> ModelSpec:
    """Raises `ConfigError` for anything that Ouro's loop as computed here doesn't mean."""
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", head_dim, "even: rotation works on halves")
    vocab = fields.integer("vocab_size")
    spec = ModelSpec(
        model_type="ouro",
        hidden_size=hidden,
        state_width=hidden,
        layers=layers,
        first_recurrent=0,
        recurrent_layers=layers,
        loops=fields.integer("total_ut_steps"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab,
        context_tokens=fields.integer("max_position_embeddings"),
        has_gate=True,
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
    fields.expect_off("rope_scaling", "use_sliding_window", "sliding_window", "attention_dropout")
    fields.expect_full_attention(layers)
    # The threshold is a default of the official generation code; requests carry their own.
    fields.ignore(*COMMON_IGNORED, "max_window_layers", "early_exit_threshold")
    fields.finish()


def tensors(spec: ModelSpec) -> TensorPlan:
    hidden = spec.hidden_size
    required: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    for index in range(spec.layers):
        prefix = f"model.layers.{index}"
        required |= llama_layer(prefix, hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate_size)
        required |= {f"{prefix}.{norm}.weight": (hidden,) for norm in LAYER_NORMS}
    return TensorPlan(required)
