"""What this server serves, as the gateway sees it: model files, the executor's facts, and what follows from both.

`ModelFiles` is read once at start; `Served` is made anew for each incarnation of the executor. Owns the union of the
end-of-sequence ids. Must not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epicycle.actors.gateway.chat import ChatTemplate, load_template
from epicycle.actors.gateway.defaults import Defaults, resolve_defaults
from epicycle.actors.gateway.tokenizer import ServedTokenizer, load_tokenizer, read_json
from epicycle.actors.gateway.trace_file import load_traces
from epicycle.actors.model_folder import model_folder
from epicycle.transport.config import Config
from epicycle.transport.wire.columns import I32, unpack_list
from epicycle.transport.wire.control import Capabilities


@dataclass(frozen=True)
class ModelFiles:
    """`traces` are the recorded exit depths of server.trace_file by trace id."""

    model_id: str
    tokenizer: ServedTokenizer | None
    template: ChatTemplate | None
    generation: dict[str, Any]
    traces: dict[str, list[int]]


@dataclass(frozen=True)
class Served:
    """`eos_ids` is the union over the model, generation_config.json, the tokenizer and the chat template's turn end."""

    files: ModelFiles
    facts: Capabilities
    defaults: Defaults
    eos_ids: frozenset[int]


def load_files(config: Config) -> ModelFiles:
    """Raises ConfigError when the folder or the trace file can't be used."""
    folder = model_folder(config.engine.model)
    tokenizer = load_tokenizer(folder)
    return ModelFiles(
        model_id=config.server.served_model_name or folder.name,
        tokenizer=tokenizer,
        template=load_template(tokenizer),
        generation=read_json(folder / "generation_config.json"),
        traces=load_traces(config.server.trace_file),
    )


def serve(files: ModelFiles, facts: Capabilities) -> Served:
    return Served(files, facts, resolve_defaults(files.generation, facts), _eos_union(files, facts))


def _eos_union(files: ModelFiles, facts: Capabilities) -> frozenset[int]:
    found = set(unpack_list(I32, facts.eos_ids))
    named = files.generation.get("eos_token_id")
    found.update(named if isinstance(named, list) else [] if named is None else [named])
    if files.tokenizer is not None:
        token = files.tokenizer.config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        found.add(-1 if not text else _id(files.tokenizer, text))
        if files.template is not None:
            turn_end = files.template.turn_end(files.tokenizer)
            found.add(-1 if turn_end is None else turn_end)
    return frozenset(token for token in found if 0 <= token < facts.vocab_size)


def _id(tokenizer: ServedTokenizer, text: str) -> int:
    token = tokenizer.id_of(text)
    return -1 if token is None else token
