"""ShareGPT conversations, and vLLM's converted form of them: text without times.

Every human turn is sent after what was said before, with the live replies. The file tells the recorded reply as text;
its length in tokens is guessed at four characters each and used as a cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from epicycle.tools.replaying.errors import Faults
from epicycle.tools.replaying.formats.base import Head, Numbered, checked, json_objects
from epicycle.tools.replaying.source import Source
from epicycle.transport.trace_rows import TraceRow

CHARS_PER_TOKEN = 4
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"assistant": "assistant", "system": "system"}


class ShareGPT:
    name = "sharegpt"
    about = "JSON list or JSONL: id, conversations of from and value (or messages of role and content)"
    times = "none"

    def sniff(self, head: Head) -> bool:
        if "session_id" in head.fields or "output_length" in head.fields:
            return False
        return "conversations" in head.fields or {"id", "messages"} <= head.fields.keys()

    def rows(self, source: Source, faults: Faults) -> Iterator[Numbered]:
        for number, (line, talk) in enumerate(json_objects(source, _Talk, faults), start=1):
            said = [(ROLES.get(one.speaker, ""), one.words) for one in talk.conversations or talk.messages or []]
            first = next((role for role, _ in said if role != "system"), "")
            if first != "user":
                faults.skip("no human turn first")
                continue
            yield from checked(source, line, faults, _turns(f"{number}:{talk.id}", said))


class _Said(msgspec.Struct, kw_only=True):
    from_: str = msgspec.field(name="from", default="")
    value: str = ""
    role: str = ""
    content: str = ""

    @property
    def speaker(self) -> str:
        return (self.from_ or self.role).lower()

    @property
    def words(self) -> str:
        return self.value or self.content


class _Talk(msgspec.Struct, kw_only=True):
    id: str | int = ""
    conversations: list[_Said] | None = None
    messages: list[_Said] | None = None


def _turns(session: str, said: list[tuple[str, str]]) -> Iterator[TraceRow]:
    new: list[dict[str, Any]] = []
    for at, (role, words) in enumerate(said):
        if role in ("user", "system") and words:
            new.append({"role": role, "content": words})
        if role != "user" or not words:
            continue
        reply = said[at + 1] if at + 1 < len(said) else ("", "")
        if reply[0] != "assistant":
            continue  # goes out with the next human turn that was answered
        yield TraceRow(
            session_id=session,
            messages=new,
            message_mode="delta",
            output_length=max(1, -(-len(reply[1]) // CHARS_PER_TOKEN)),
            output_mode="cap",
        )
        new = []
