"""The formats by name, in the order in which an unnamed file is tried; and how one is chosen.

A new format is a file beside this one and a line here.
"""

from __future__ import annotations

import json

from epicycle.tools.replaying.errors import TraceError
from epicycle.tools.replaying.formats.aiperf import Aiperf, AiperfMultiTurn
from epicycle.tools.replaying.formats.azure import Azure
from epicycle.tools.replaying.formats.bailian import Bailian
from epicycle.tools.replaying.formats.base import Format, Head
from epicycle.tools.replaying.formats.burstgpt import BurstGPT
from epicycle.tools.replaying.formats.mooncake import Mooncake
from epicycle.tools.replaying.formats.native import Native
from epicycle.tools.replaying.formats.sharegpt import ShareGPT
from epicycle.tools.replaying.formats.tracelab import TraceLab
from epicycle.tools.replaying.formats.weka import Weka
from epicycle.tools.replaying.source import Source

_ALL: tuple[Format, ...] = (
    BurstGPT(),
    Azure(),
    Native(),
    Bailian(),
    TraceLab(),
    Weka(),
    AiperfMultiTurn(),
    ShareGPT(),
    Mooncake(),
    Aiperf(),
)
FORMATS: dict[str, Format] = {one.name: one for one in _ALL}


def choose(source: Source, name: str = "auto") -> Format:
    """The format called `name`, or the first that knows the file's beginning. Raises TraceError."""
    if name != "auto":
        return FORMATS[name]
    head = _head(source.head().removeprefix(b"\xef\xbb\xbf"))
    for one in FORMATS.values():
        if one.sniff(head):
            return one
    text = f"no format knows its beginning {head.line[:80]!r}; name one with --format ({', '.join(FORMATS)})"
    raise TraceError(text, path=source.name)


def _head(content: bytes) -> Head:
    text = content.decode(errors="replace").lstrip()
    first = text[:1]
    line = text.split("\n", 1)[0]
    if first == "[":
        return Head(line, _first_element(text), first)
    fields = _object(line) or _object(text) if first == "{" else {}
    return Head(text[:4096] if first == "{" and not fields else line, fields, first)


def _first_element(text: str) -> dict[str, object]:
    """The first object of a list, or what can be told of one that is longer than what was read."""
    inner = text[1:].lstrip()
    return _object(inner) or {name: None for name in ("conversations", "id", "messages") if f'"{name}"' in inner[:4096]}


def _object(text: str) -> dict[str, object]:
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
