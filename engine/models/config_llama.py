"""What the configs and checkpoints of looped Llama-shaped stacks (Ouro, Nanbeige) share: keys, rules, tensor names.

Torch-free. Owns what both read and refuse alike; each architecture adds its own keys and refusals, and `finish`es.
"""

from __future__ import annotations

from collections.abc import Sequence

from epicycle.engine.models.fields import COMMON_IGNORED, Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import Shape


def parse_stack(
    fields: Fields,
    model_type: str,
    *,
    loops: Sequence[str],
    head_dim: Sequence[str],
    derives_head_dim: bool,
    has_gate: bool,
) -> ModelSpec:
    """One stack whose layers all loop. `loops` and `head_dim` are the keys' spellings; with `derives_head_dim` the
    heads may share hidden_size. Raises `ConfigError`."""
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}")
    width = fields.integer(*head_dim, default=hidden // heads if derives_head_dim else None)
    if width % 2:
        raise fields.refuse("head_dim", width, "even: rotation works on halves")
    vocab = fields.integer("vocab_size")
    spec = ModelSpec(
        model_type=model_type,
        hidden_size=hidden,
        state_width=hidden,
        layers=layers,
        first_recurrent=0,
        recurrent_layers=layers,
        loops=fields.integer(*loops),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab,
        context_tokens=fields.integer("max_position_embeddings"),
        has_gate=has_gate,
        has_costly_boundary=False,
        has_tied_head=False,
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=fields.number("rope_theta"),
        init_std=fields.number("initializer_range", default=0.02),
        eos_ids=fields.token_ids("eos_token_id", vocab),
        bos_id=fields.token_id("bos_token_id", vocab),
        pad_id=fields.token_id("pad_token_id", vocab),
    )
    fields.expect("hidden_act", "silu")
    fields.expect("tie_word_embeddings", False)
    fields.expect_off("rope_scaling", "use_sliding_window", "sliding_window", "attention_dropout")
    fields.expect_full_attention(layers)
    fields.ignore(*COMMON_IGNORED, "max_window_layers")
    return spec


def stack_tensors(spec: ModelSpec, norms: Sequence[str]) -> dict[str, Shape]:
    """All weights of the stack; `norms` are the names of one layer's."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    for index in range(spec.layers):
        prefix = f"model.layers.{index}"
        found |= {
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        found |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
    return found
