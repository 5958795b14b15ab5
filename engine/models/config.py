"""From a model folder to its `ModelSpec`.

Owns the reading of config.json, generation_config.json and the tokenizer's files, and the union of every end-of-text
declaration among them: published checkpoints disagree with themselves, and missing one lets a reply run on.
Torch-free; the meaning of config.json's keys is the architecture's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from epicycle.engine.errors import ConfigError
from epicycle.engine.models.fields import Fields, Json
from epicycle.engine.models.registry import architecture
from epicycle.engine.models.spec import ModelSpec


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`, EOS ids united and generation defaults filled in."""
    raw = read_json(folder / "config.json")
    if raw is None:
        raise ConfigError("bad_config", f"{folder}: config.json is missing")
    spec = architecture(raw.get("model_type")).parse(Fields(raw, "config.json"))
    generation = read_json(folder / "generation_config.json") or {}
    fields = Fields(generation, "generation_config.json")
    declared = {*spec.eos_ids, *fields.token_ids("eos_token_id", spec.vocab_size), *_tokenizer_eos(folder, spec)}
    return replace(
        spec,
        eos_ids=tuple(sorted(declared)),
        exit_threshold=_default_threshold(fields),
        min_loops=min(fields.integer("min_loops", default=1), spec.loops),
    )


def read_json(path: Path) -> Mapping[str, Json] | None:
    """The object in a JSON file, or None where the file is absent."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("bad_config", f"{path.name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("bad_config", f"{path.name}: not an object")
    return value


def _default_threshold(fields: Fields) -> float:
    threshold = fields.number("exit_threshold", default=1.0)
    if threshold > 1.0:
        raise fields.refuse("exit_threshold", threshold, "at most 1.0")
    return threshold


def _tokenizer_eos(folder: Path, spec: ModelSpec) -> set[int]:
    """Ids of the tokens that tokenizer_config.json calls the end of a text or of a turn."""
    declared = read_json(folder / "tokenizer_config.json") or {}
    texts = {_token_text(declared.get(key)) for key in ("eos_token", "eot_token")} - {None}
    if not texts:
        return set()
    ids = _added_token_ids(folder, declared)
    found = {ids[text] for text in texts if text in ids}
    outside = [token for token in found if token >= spec.vocab_size]
    if outside:
        text = f"tokenizer.json: token id {outside[0]} is outside vocab_size {spec.vocab_size}"
        raise ConfigError("unsupported_value", text)
    return found


def _added_token_ids(folder: Path, declared: Mapping[str, Json]) -> dict[str, int]:
    """Text -> id of added tokens, from tokenizer.json and tokenizer_config.json's decoder table."""
    ids: dict[str, int] = {}
    decoder = declared.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids |= {text: int(key) for key, value in decoder.items() if (text := _token_text(value)) is not None}
    listed = (read_json(folder / "tokenizer.json") or {}).get("added_tokens")
    for token in listed if isinstance(listed, list) else []:
        ids[token["content"]] = token["id"]
    return ids


def _token_text(value: Json) -> str | None:
    """A token is written as its text, or as an object with the text under `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
