"""Conversations under way, and what was said in those that go on from earlier rows.

Owns both and how long they are remembered. It must not know when rows are sent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from epicycle.transport.trace_rows import TraceRow

IDLE_SESSIONS = 16_384
REMEMBERED_ROWS = 65_536
REMEMBERED_BYTES = 256 << 20
NUMBER_BYTES = 36  # of an int in a list


@dataclass(eq=False)
class Said:
    """One row's own part of a conversation and the reply to it, after `before`, which branches share.

    `own` is what the row added, as ids (array "i"), messages or text; `reply` the same of the answer, None where the
    server told none. `kept_tokens` is how much of what was said before the row kept; None: all.
    """

    before: Said | None
    own: Any
    reply: Any = None
    kept_tokens: int | None = None

    @property
    def size(self) -> int:
        """About so many bytes, what was said before left out."""
        own = _messages_bytes(self.own) if isinstance(self.own, list) else 4 * len(self.own)
        return own + 4 * len(self.reply or ())


@dataclass(eq=False)
class Session:
    """`order` is the place of its first row in the file. `live` counts rows that wait for their time or are in flight.

    `last_id` is the row that one without wait_for follows, `queued` names rows that are due without its having a turn.
    """

    name: str
    order: int
    held: int = 0
    live: int = 0
    has_slot: bool = False
    is_stopped: bool = False
    turns: int = 0
    last_id: str = ""
    queued: list[str] = field(default_factory=list)


class Sessions:
    """Conversations by name. Those without held rows are kept until too many are idle."""

    def __init__(self, idle: int = IDLE_SESSIONS) -> None:
        self._busy: dict[str, Session] = {}
        self._idle: OrderedDict[str, Session] = OrderedDict()
        self._most_idle = idle
        self._count = 0

    def of(self, name: str) -> Session:
        """The conversation of a row that is about to be held; a row without one gets a conversation of its own."""
        session = self._busy.get(name) or self._idle.pop(name, None) if name else None
        if session is None:
            session = Session(name, self._count)
            self._count += 1
        if name:
            self._busy[name] = session
        session.held += 1
        return session

    def leave(self, session: Session) -> None:
        """A row of it is held no more."""
        session.held -= 1
        if session.held or not session.name:
            return
        del self._busy[session.name]
        self._idle[session.name] = session
        if len(self._idle) > self._most_idle:
            self._idle.popitem(last=False)


@dataclass
class Histories:
    """What was said, by row; the oldest are forgotten, but stay as parts of what went on from them."""

    most: int = REMEMBERED_ROWS
    most_bytes: int = REMEMBERED_BYTES
    _said: OrderedDict[str, Said] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def keep(self, name: str, said: Said) -> None:
        self._said[name] = said
        self._bytes += said.size
        while len(self._said) > 1 and (len(self._said) > self.most or self._bytes > self.most_bytes):
            self._bytes -= self._said.popitem(last=False)[1].size

    def of(self, name: str) -> Said | None:
        """None for a row that said nothing, that failed, or that was forgotten."""
        return self._said.get(name)


def size_of(row: TraceRow) -> int:
    """About so many bytes of memory."""
    numbers = len(row.hash_ids or ()) + len(row.token_ids or ()) + len(row.exit_depths or ())
    return NUMBER_BYTES * numbers + len(row.text_input or "") + _messages_bytes(row.messages or ())


def _messages_bytes(messages: Iterable[dict[str, Any]]) -> int:
    return sum(len(str(value)) for message in messages for value in message.values())


def ids_of(said: Said | None) -> array[int]:
    """All token ids up to and with `said`: every row's own and every reply, oldest first."""
    whole = array("i")
    for one in chain(said):
        if one.kept_tokens is not None:
            del whole[one.kept_tokens :]
        whole.extend(one.own)
        if one.reply is not None:
            whole.extend(one.reply)
    return whole


def messages_of(said: Said | None) -> list[dict[str, Any]]:
    """All messages up to and with `said`, the live replies as the assistant's."""
    whole: list[dict[str, Any]] = []
    for one in chain(said):
        whole += one.own
        if one.reply is not None:
            whole.append({"role": "assistant", "content": one.reply})
    return whole


def text_of(said: Said | None) -> str:
    """All text up to and with `said`."""
    return "".join(one.own + (one.reply or "") for one in chain(said))


def chain(said: Said | None) -> list[Said]:
    """From the beginning of the conversation to `said`."""
    found = []
    while said is not None:
        found.append(said)
        said = said.before
    return found[::-1]
