"""Every architecture this engine knows, by the `model_type` of its config.json.

Owns one dict of "module:attribute" references. The config and tensor references resolve without torch; the model's
does not, which is why they are strings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from epicycle.engine.errors import ConfigError
from epicycle.engine.models.fields import Fields
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.models.tensor_plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Architecture:
    """References of one architecture; call the properties to resolve them."""

    config: str
    tensor_names: str
    model: str

    @property
    def parse(self) -> Callable[[Fields], ModelSpec]:
        return cast("Callable[[Fields], ModelSpec]", _resolve(self.config))

    @property
    def tensors(self) -> Callable[[ModelSpec], TensorPlan]:
        return cast("Callable[[ModelSpec], TensorPlan]", _resolve(self.tensor_names))

    @property
    def model_class(self) -> Any:
        """The class to build; resolving it imports torch."""
        return _resolve(self.model)


_HERE = "epicycle.engine.models"

ARCHITECTURES = {
    "ouro": Architecture(f"{_HERE}.config_ouro:parse", f"{_HERE}.config_ouro:tensors", f"{_HERE}.ouro:OuroModel"),
    "huginn_raven": Architecture(
        f"{_HERE}.config_huginn:parse", f"{_HERE}.config_huginn:tensors", f"{_HERE}.huginn:HuginnModel"
    ),
    "nanbeige": Architecture(
        f"{_HERE}.config_nanbeige:parse", f"{_HERE}.config_nanbeige:tensors", f"{_HERE}.nanbeige:NanbeigeModel"
    ),
}


def architecture(model_type: object) -> Architecture:
    """The entry for a `model_type`; raises `ConfigError` naming those that exist."""
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    known = ", ".join(sorted(ARCHITECTURES))
    raise ConfigError("unsupported_value", f"config.json: model_type={model_type!r} is not one of {known}")


def _resolve(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
