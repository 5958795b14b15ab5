"""From what a user calls a model to the files that make it.

Owns the names: `embedded` (and `embedded:ouro`, `embedded:huginn`) for the small trained models in the package, a
config name for a published shape without weights, or a folder in the layout of a Hugging Face checkpoint. Nothing is
downloaded. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epicycle.engine.errors import LoadError
from epicycle.engine.models.checkpoint import has_weights

Weights = Literal["checkpoint", "random"]

_PACKAGE = Path(__file__).resolve().parent

# Name -> folder inside the package. The first of the embedded models is what a plain `embedded` means.
EMBEDDED = {
    "embedded": "embedded/ouro-tiny",
    "embedded:ouro": "embedded/ouro-tiny",
    "embedded:huginn": "embedded/huginn-tiny",
}
CONFIGS = {
    "ouro-1.4b": "configs/ouro-1.4b",
    "huginn-0125": "configs/huginn-0125",
    "nanbeige4.2-3b": "configs/nanbeige4.2-3b",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder; `served_id` is what clients see as the model's name."""

    folder: Path
    served_id: str
    has_weights: bool
    tokenizer: Path | None  # tokenizer.json


def locate(name: str, weights: Weights = "checkpoint") -> ModelFiles:
    """The files of model `name`. Raises `LoadError` unknown_model or missing_weights, naming --model or --weights."""
    files = _describe(_folder(name))
    if weights == "checkpoint" and not files.has_weights:
        text = f"--model {name}: {files.folder.name} has no weights; give a checkpoint folder or --weights random"
        raise LoadError("missing_weights", text)
    return files


def _folder(name: str) -> Path:
    inside = EMBEDDED.get(name) or CONFIGS.get(name)
    if inside is not None:
        return _PACKAGE / inside
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        known = ", ".join([*EMBEDDED, *CONFIGS])
        text = f"--model {name}: neither one of {known} nor a folder with a config.json (nothing is downloaded)"
        raise LoadError("unknown_model", text)
    return folder.resolve()


def _describe(folder: Path) -> ModelFiles:
    tokenizer = folder / "tokenizer.json"
    return ModelFiles(folder, folder.name, has_weights(folder), tokenizer if tokenizer.is_file() else None)
