"""The served tokenizer, or its absence: text <-> ids for the gateway's own requests.

Owns the loaded `tokenizers.Tokenizer` and what is derived from it once. A model folder without tokenizer.json still
serves ids: `load_tokenizer` then returns None and the callers refuse text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class ServedTokenizer:
    """`special_ids` are left out of text; `config` is tokenizer_config.json (chat template, declared specials).

    `token_bytes` maps every id to the bytes it stands for, for byte-level tokenizers; None for other kinds.
    """

    raw: Tokenizer
    special_ids: frozenset[int]
    config: dict[str, Any]
    token_bytes: dict[int, bytes] | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The token's own text, specials included; what logprobs report."""
        return self.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes; those of its text where the tokenizer isn't byte-level."""
        if self.token_bytes is not None:
            return self.token_bytes.get(token_id, b"")
        return self.token_text(token_id).encode()

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
    is_byte_level = (read_json(path).get("decoder") or {}).get("type") == "ByteLevel"
    return ServedTokenizer(
        raw=raw,
        special_ids=special,
        config=read_json(folder / "tokenizer_config.json"),
        token_bytes=_byte_table(raw) if is_byte_level else None,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when the file isn't there."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _byte_table(raw: Tokenizer) -> dict[int, bytes]:
    """Byte-level tokens spell bytes as printable letters; one with any other letter stands for its own UTF-8."""
    byte_of = _byte_letters()
    table: dict[int, bytes] = {}
    for token, token_id in raw.get_vocab(with_added_tokens=True).items():
        spelled = [byte_of.get(letter) for letter in token]
        if None in spelled:
            table[token_id] = token.encode()
        else:
            table[token_id] = bytes(byte for byte in spelled if byte is not None)
    return table


def _byte_letters() -> dict[str, int]:
    """The letter-to-byte map that GPT-2 introduced: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + rank): byte for rank, byte in enumerate(others)}
