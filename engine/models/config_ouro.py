"""Ouro's config and tensor names (`model_type` "ouro"): what is read, what is ignored, what is refused.

Torch-free. Every count comes from the file, so the larger siblings of Ouro-1.4B load the same way.
"""

from __future__ import annotations

from epicycle.engine.models.config_llama import parse_stack, stack_tensors
from epicycle.engine.models.fields import Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import TensorPlan

LAYER_NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def parse(fields: Fields) -> ModelSpec:
    """Raises `ConfigError` for anything that Ouro's loop as computed here doesn't mean."""
    spec = parse_stack(
        fields, "ouro", loops=("total_ut_steps",), head_dim=("head_dim",), derives_head_dim=True, has_gate=True
    )
    fields.ignore("early_exit_threshold")  # a default of the official generation code; requests carry their own
    fields.finish()
    return spec


def tensors(spec: ModelSpec) -> TensorPlan:
    gate = {"model.early_exit_gate.weight": (1, spec.hidden_size), "model.early_exit_gate.bias": (1,)}
    return TensorPlan({**stack_tensors(spec, LAYER_NORMS), **gate})
