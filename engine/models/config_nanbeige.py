"""Nanbeige's config and tensor names (`model_type` "nanbeige"): what is read, ignored and refused.

Torch-free. Query width (heads x head_dim) is not hidden_size here, so head_dim must be given.
"""

from __future__ import annotations

from epicycle.engine.models.config_llama import parse_stack, stack_tensors
from epicycle.engine.models.fields import Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import TensorPlan

# Switches of the published class that change the arithmetic; we have none of them.
_VARIANTS = (
    "attention_bias",
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
)


def parse(fields: Fields) -> ModelSpec:
    """Raises `ConfigError` for anything that the plain looped block computed here doesn't mean."""
    spec = parse_stack(
        fields,
        "nanbeige",
        loops=("num_loops", "total_ut_steps"),
        head_dim=("head_dim", "kv_channels"),
        derives_head_dim=False,
        has_gate=False,
    )
    # Whether it drops every norm or only those between loops differs between published codes.
    fields.expect("skip_loop_final_norm", False, None)
    fields.expect_off(*_VARIANTS)
    fields.ignore("pretraining_tp")
    fields.finish()
    return spec


def tensors(spec: ModelSpec) -> TensorPlan:
    return TensorPlan(stack_tensors(spec, ("input_layernorm", "post_attention_layernorm")))
