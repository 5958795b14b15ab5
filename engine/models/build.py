"""From located files to a model that can run.

Owns the order: spec, weights, model. Device and dtype are decided by the caller; the operations too.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch

from epicycle.engine.kernels.ops import Ops
from epicycle.engine.models import checkpoint
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.config import read_spec
from epicycle.engine.models.loader import load_weights, random_weights
from epicycle.engine.models.locate import ModelFiles, Weights
from epicycle.engine.models.registry import architecture
from epicycle.engine.models.spec import ModelSpec


def build_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: Weights,
    ops: Ops,
    start_state: str = "noise",
    seed: int = 0,
) -> LoopedModel:
    """The model of `files` on `device`; `seed` is that of random weights, `start_state` matters to Huginn only.

    Raises `ConfigError` or `LoadError`.
    """
    spec = read_spec(files.folder)
    if weights == "random":
        tensors = random_weights(spec, seed=seed, dtype=dtype, device=device)
    else:
        tensors = load_weights(files.folder, spec, dtype=dtype, device=device)
    return assemble(spec, tensors, ops, start_state)


def assemble(spec: ModelSpec, tensors: dict[str, torch.Tensor], ops: Ops, start_state: str = "noise") -> LoopedModel:
    """A model from tensors by public name; consumes the dict."""
    model_class = architecture(spec.model_type).model_class
    if spec.has_costly_boundary:
        model = model_class(spec, tensors, ops, start_state)
    else:
        model = model_class(spec, tensors, ops)
    assert not tensors, f"weights nobody took: {sorted(tensors)}"
    return cast("LoopedModel", model)


def weights_fingerprint(files: ModelFiles, *, weights: Weights, seed: int) -> str:
    """Hex SHA-256 naming the weights; part of the key of everything that is cached by content."""
    if weights == "checkpoint":
        return checkpoint.fingerprint(files.folder)
    return hashlib.sha256(f"random {seed} {read_spec(files.folder)}".encode()).hexdigest()
