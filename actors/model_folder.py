"""Where a model's files are: the embedded checkpoints, the shipped configurations, or a folder of the user's.

For actors that read config.json or the tokenizer without torch. It must not know what is in the files.
"""

from __future__ import annotations

from pathlib import Path

from epicycle.transport.config import ConfigError

_MODELS = Path(__file__).resolve().parent.parent / "engine" / "models"
EMBEDDED = {"embedded": "ouro-tiny", "embedded:ouro": "ouro-tiny", "embedded:huginn": "huginn-tiny"}


def model_folder(model: str) -> Path:
    """The folder of `engine.model`; it holds config.json. Raises ConfigError when there is none."""
    if model in EMBEDDED:
        return _MODELS / "embedded" / EMBEDDED[model]
    folders = [_MODELS / "configs" / model, Path(model).expanduser()]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"engine.model is {model!r}: no {' or '.join(str(folder / 'config.json') for folder in folders)}; "
        f"use one of {', '.join(EMBEDDED)}, the name of a shipped configuration, or a folder"
    )
