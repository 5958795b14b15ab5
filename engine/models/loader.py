"""Tensors of a model, by their public names: streamed from a checkpoint, or drawn at random.

Owns casting and placing. A checkpoint is checked as a whole first (`checkpoint.check`), then read tensor by tensor, so
that the host holds one tensor at a time. safetensors only: nothing in a folder is ever executed or unpickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from epicycle.engine.errors import LoadError
from epicycle.engine.models import checkpoint
from epicycle.engine.models.registry import architecture
from epicycle.engine.models.rope import pair_tables
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import TensorPlan

# Stored rotation constants may differ from ours by float32 rounding of angles up to the context length, not by more.
_CONSTANT_TOLERANCE = 2e-3


def load_weights(folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights of `spec` from `folder`, cast to `dtype` on `device`; constants stay float32.

    Raises `LoadError`, naming the tensor, for a checkpoint that isn't exactly this model.
    """
    plan = architecture(spec.model_type).tensors(spec)
    stored = checkpoint.scan(folder)
    checkpoint.check(stored, plan)
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted({tensor.file for tensor in stored.values()})
        }
        return _stream(
            _Reader({name: files[tensor.file] for name, tensor in stored.items()}), plan, spec, dtype, device
        )


def random_weights(spec: ModelSpec, *, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights drawn from the config's initial spread: norms one, biases zero, the rest normal(0, init_std).

    Each tensor is keyed by (seed, name), so the same name and shape give the same values in any model.
    """
    plan = architecture(spec.model_type).tensors(spec)
    weights: dict[str, Tensor] = {}
    for name, shape in plan.required.items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape, dtype=dtype, device=device)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(
                0, spec.init_std, generator=generator
            )
    return weights


class _Reader:
    """Reads tensors by name from the open files that hold them."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _stream(
    reader: _Reader, plan: TensorPlan, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    copies = {original: copy for copy, original in plan.tied.items() if copy in reader}
    weights: dict[str, Tensor] = {}
    for name in plan.required:
        tensor = reader.read(name if name in reader else copies[name])
        if name in reader and name in copies:
            _check_copy(copies[name], reader.read(copies[name]), name, tensor)
        weights[name] = tensor.to(device=device, dtype=dtype)
    for name in plan.constants:
        if name in reader:
            weights[name] = _checked_rotation(name, reader.read(name), spec).to(device)
    return weights


def _check_copy(copy_name: str, copy: Tensor, name: str, original: Tensor) -> None:
    if copy.dtype != original.dtype or not torch.equal(copy, original):
        raise LoadError("tensor_value", f"tensor {copy_name} is tied to {name} but holds other values")


def _checked_rotation(name: str, stored: Tensor, spec: ModelSpec) -> Tensor:
    """A stored rotation table [1, context, 1, d / 2, 2], in float32 and within rounding of the config's angles."""
    cos, sin = pair_tables(spec.head_dim, spec.rope_theta, spec.context_tokens)
    expected = torch.stack((cos, sin), dim=-1)[None, :, None]
    error = (stored.float() - expected).abs().max().item()
    if stored.dtype != torch.float32 or not error <= _CONSTANT_TOLERANCE:
        text = f"tensor {name} is {stored.dtype} and {error:.1e} away from rope_base {spec.rope_theta}"
        raise LoadError("tensor_value", f"{text}; it must be float32 within {_CONSTANT_TOLERANCE}")
    return stored
