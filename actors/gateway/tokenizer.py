"""The served tokenizer, or its absence: text <-> ids for the gateway's own requests.

Owns the loaded `tokenizers.Tokenizer` and nothing else. A model folder without tokenizer.json still serves ids:
`load_tokenizer` then returns None and the callers refuse text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class ServedTokenizer:
    """`special_ids` are left out of text; `config` is tokenizer_config.json (chat template, declared specials)."""

    raw: Tokenizer
    special_ids: frozenset[int]
    config: dict[str, Any]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The token's own text, specials included; what logprobs report."""
        return self.decode([token_id], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        found: int | None = self.raw.token_to_id(token)
        return found


def load_tokenizer(folder: Path) -> ServedTokenizer | None:
    """Reads tokenizer.json and tokenizer_config.json of a model folder; None when there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = Tokenizer.from_file(str(path))
    added = raw.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return ServedTokenizer(raw=raw, special_ids=special, config=read_json(folder / "tokenizer_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when the file isn't there."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
