"""Incremental detokenizing: one id in, the text that is certain by now out.

Both detokenizers hold back bytes that are not a character yet, never take back what they gave, and add up, flush
included, to the decoding of all ids at once. Owns undecoded bytes of one sequence; must not know stops or events.
"""

from __future__ import annotations

import codecs
import time
from typing import Protocol

from epicycle.actors.gateway.tokenizer import ServedTokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """The new text once `token` has come; often empty."""

    def flush(self) -> str:
        """What was held back, replacement characters for bytes that never became one. The end."""


class ByteDetokenizer:
    """For byte-level tokenizers: a table of bytes and the standard library's incremental decoder."""

    def __init__(self, tokenizer: ServedTokenizer, *, skip_special_tokens: bool) -> None:
        assert tokenizer.token_bytes is not None
        self._bytes_of = tokenizer.token_bytes.get
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = _UTF8("replace").decode

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decode(self._bytes_of(token, b""))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other kind, and the plain twin: decodes a short window of ids again for each token.

    The window starts with the ids whose text was given last, because a decoder may treat the first id of a text
    differently (a leading space that is stripped).
    """

    def __init__(self, tokenizer: ServedTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._given: list[int] = []
        self._given_text = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._window_text()
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._given_text):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._window_text())

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._given + self._held, skip_special_tokens=self._skips)

    def _give(self, text: str) -> str:
        new = text[len(self._given_text) :]
        self._given, self._held = self._held, []
        self._given_text = self._tokenizer.decode(self._given, skip_special_tokens=self._skips)
        return new


class NoText:
    """For a server without a tokenizer: ids only."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class DetokenizerClock:
    """Another detokenizer, and the seconds spent in it: what a traced request wants to know."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.busy_s = 0.0
        self._detokenizer = detokenizer

    def push(self, token: int) -> str:
        begun_s = time.perf_counter()
        text = self._detokenizer.push(token)
        self.busy_s += time.perf_counter() - begun_s
        return text

    def flush(self) -> str:
        return self._detokenizer.flush()


def make_detokenizer(tokenizer: ServedTokenizer | None, *, skip_special_tokens: bool = True) -> Detokenizer:
    if tokenizer is None:
        return NoText()
    kind = WindowDetokenizer if tokenizer.token_bytes is None else ByteDetokenizer
    return kind(tokenizer, skip_special_tokens=skip_special_tokens)
