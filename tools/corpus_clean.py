"""Text cleaning shared by the corpus sources: plain ASCII, tidy spaces, unwanted and private content, duplicates.

Owns the filters. Must not know where a text comes from.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": " - ", "–": "-", "…": "...", "\u00a0": " ", "\u00ad": None}
)
# What ends a real conversation, in rot13 so that this file can be read in company: stems, then whole words.
_STEMS_ROT13 = (
    "shpx fuvg ovgpu phag chffl cravf intvan cbea avtt encrq encvat frkh fyhg juber onfgneq nffubyr ahqr anxrq obbof "
    "uvgyre anmv fhvpvq ergneq pbpnvar znevwhnan zbezba zhfyvz wrjvfu uvyynel"
)
_WORDS_ROT13 = "qvpx pbpx sht snt snttbg encr encrf frk frkl phz jgs fgsh ubeal jrrq qehtf wrj wrjf gehzc yqf olh cebib"
_UNWANTED = re.compile(
    rf"\b(({'|'.join(codecs.decode(_STEMS_ROT13, 'rot13').split())})\w*"
    rf"|({'|'.join(codecs.decode(_WORDS_ROT13, 'rot13').split())}))\b|\bkill (my|your)self\b",
    re.IGNORECASE,
)
_PRIVATE = re.compile(
    r"@|https?:|www\.|\.(com|org)\b|\d{5,}|\d{3}[-. ]\d{3}|\b(snapchat|instagram|facebook|phone number|last name)",
    re.IGNORECASE,
)
_CHAT_SPELLINGS = (
    (re.compile(r"([a-z])\1{3,}"), r"\1\1"),
    (re.compile(r"\bi\b(?!\.)"), "I"),
    (re.compile(r"\b(d|w|c)ont\b"), r"\1on't"),
    (re.compile(r"\bim\b", re.IGNORECASE), "I'm"),
    (re.compile(r"\bur\b"), "your"),
    (re.compile(r"\bu\b"), "you"),
    (re.compile(r"\br\b"), "are"),
)


def plain_ascii(text: str) -> str:
    """Typographic signs spelled plainly, accents dropped, everything else outside ASCII removed."""
    spelled = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHY))
    return "".join(sign for sign in spelled if sign == "\n" or " " <= sign <= "~")


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def is_unwanted(text: str) -> bool:
    """Whether a text has words or topics (abuse, drugs, faith, parties) that a small model should not learn."""
    return _UNWANTED.search(text) is not None


def is_private(text: str) -> bool:
    """Whether a text may name a person, an account or an address."""
    return _PRIVATE.search(text) is not None


def mend_chat_spelling(text: str) -> str:
    """Common chat spellings written out, the first letter capital."""
    for pattern, spelling in _CHAT_SPELLINGS:
        text = pattern.sub(spelling, text)
    return capital(text)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    return ("an " if noun[:1].lower() in "aeiou" else "a ") + noun


def turn(role: str, text: str) -> str:
    """One ChatML turn."""
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"


def exchange(question: str, answer: str) -> str:
    """A user turn and the assistant's answer."""
    return turn("user", question) + turn("assistant", answer)


def group_paragraphs(paragraphs: Iterable[str], low: int = 900, high: int = 2200, least: int = 300) -> list[str]:
    """Documents of about low..high characters; a rest below `least` is dropped."""
    documents: list[str] = []
    group: list[str] = []
    for paragraph in paragraphs:
        length = sum(map(len, group))
        if group and length >= low and length + len(paragraph) > high:
            documents.append("\n\n".join(group))
            group = []
        group.append(paragraph)
    if sum(map(len, group)) >= least:
        documents.append("\n\n".join(group))
    return documents


def without_duplicates(documents: Sequence[str]) -> list[str]:
    """Documents that differ in more than case and punctuation, in their first order."""
    kept: dict[bytes, str] = {}
    for document in documents:
        letters = re.sub(r"\W+", "", document.lower()).encode()
        kept.setdefault(hashlib.blake2b(letters, digest_size=8).digest(), document)
    return list(kept.values())
