"""Detokenizing token by token equals decoding everything at once, whatever the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epicycle.actors.gateway.text import ByteDetokenizer, Detokenizer, WindowDetokenizer
from epicycle.actors.gateway.tokenizer import ServedTokenizer, load_tokenizer
from epicycle.actors.model_folder import model_folder

TEXTS = [
    "plain words, digits 1234 and\ttabs",
    "line\r\nline\n\n\nend \r\n",
    "caf\u00e9 na\u00efve \u00bfqu\u00e9?",
    "e\u0301 combining a\u0308\u0323",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd",
    "real replacement character \ufffd in the middle\ufffd",
    "special <|im_end|> inside <|endoftext|> and after",
    " leading and trailing ",
]


def embedded() -> ServedTokenizer:
    tokenizer = load_tokenizer(model_folder("embedded:ouro"))
    assert tokenizer is not None
    return tokenizer


TOKENIZER = embedded()
KINDS = [ByteDetokenizer, WindowDetokenizer]


def run(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_whole(kind: type[ByteDetokenizer], skips: bool, text: str) -> None:
    ids = TOKENIZER.encode(text)
    expected = TOKENIZER.decode(ids, skip_special_tokens=skips)
    assert expected == run(kind(TOKENIZER, skip_special_tokens=skips), ids)
    if not skips:
        assert text == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 4095) | st.integers(3, 258), max_size=30))
def test_any_ids_add_up_to_the_whole(kind: type[ByteDetokenizer], ids: list[int]) -> None:
    """Ids 3 to 258 are single bytes, so most sequences are invalid UTF-8 in every possible way."""
    assert TOKENIZER.decode(ids) == run(kind(TOKENIZER, skip_special_tokens=True), ids)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_truncated_character_is_flushed_as_replacement(cut: int) -> None:
    byte_id = {value: token for token, value in (TOKENIZER.token_bytes or {}).items() if len(value) == 1}
    ids = [byte_id[bytes([byte])] for byte in "\U0001f600".encode()[:cut]]
    detokenizer = ByteDetokenizer(TOKENIZER, skip_special_tokens=True)
    assert [""] * cut == [detokenizer.push(token) for token in ids]
    assert "\ufffd" == detokenizer.flush()


def test_unknown_ids_have_no_text() -> None:
    assert "" == run(ByteDetokenizer(TOKENIZER, skip_special_tokens=True), [100_000])
