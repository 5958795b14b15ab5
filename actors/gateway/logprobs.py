"""The two shapes of logprobs: four parallel lists on completions, a list of entries on chat.

Pure functions of pieces and the tokenizer. Every entry stands for one token, so that the lists are as long as the
choice's tokens (with echo: the prompt's first, whose first entry is null).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epicycle.actors.gateway.pieces import Piece, PromptPart, TokenLogprob
from epicycle.actors.gateway.text import make_detokenizer
from epicycle.actors.gateway.tokenizer import ServedTokenizer


def token_name(tokenizer: ServedTokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


@dataclass
class CompletionLogprobs:
    """The object of /v1/completions; also the wire form of one event."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokenizer: ServedTokenizer | None, token: int, logprob: TokenLogprob, offset: int) -> None:
        name = token_name(tokenizer, token)
        self.tokens.append(name)
        self.token_logprobs.append(logprob.logprob)
        self.top_logprobs.append(_top_dict(tokenizer, name, logprob))
        self.text_offset.append(offset)

    def add_prompt(self, tokenizer: ServedTokenizer | None, part: PromptPart) -> None:
        detokenizer, offset = make_detokenizer(tokenizer), 0
        for token, logprob in zip(part.prompt.ids, part.logprobs, strict=True):
            self.add(tokenizer, token, logprob, offset)
            offset += len(detokenizer.push(token))

    def add_piece(self, tokenizer: ServedTokenizer | None, piece: Piece) -> None:
        if piece.part is not None and piece.part.logprobs:
            self.add_prompt(tokenizer, piece.part)
        if piece.logprob is not None:
            self.add(tokenizer, piece.token, piece.logprob, piece.offset)


def chat_entry(tokenizer: ServedTokenizer | None, token: int, logprob: TokenLogprob) -> dict[str, Any]:
    """One entry of a chat choice's logprobs.content."""
    entry = _named(tokenizer, token, logprob.logprob)
    entry["top_logprobs"] = [_named(tokenizer, top_id, top) for top_id, top in logprob.top]
    return entry


def chat_logprobs(tokenizer: ServedTokenizer | None, piece: Piece) -> dict[str, Any] | None:
    if piece.logprob is None:
        return None
    return {"content": [chat_entry(tokenizer, piece.token, piece.logprob)]}


def _named(tokenizer: ServedTokenizer | None, token: int, logprob: float | None) -> dict[str, Any]:
    name = token_name(tokenizer, token)
    spelled = None if tokenizer is None else list(tokenizer.bytes_of(token))
    return {"token": name, "logprob": logprob, "bytes": spelled}


def _top_dict(tokenizer: ServedTokenizer | None, name: str, logprob: TokenLogprob) -> dict[str, float] | None:
    """Alternatives by text, the chosen token among them. Of several ids with one text the likeliest is kept."""
    if logprob.logprob is None:
        return None
    tops: dict[str, float] = {}
    for top_id, top in logprob.top:
        tops.setdefault(token_name(tokenizer, top_id), top)
    tops.setdefault(name, logprob.logprob)
    return tops
