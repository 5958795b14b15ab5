"""From a row to the request that is sent: its prompt with all that was said before, its length limits, its body.

Owns what replies mean for later rows. It must not know times or connections.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from epicycle.tools.replaying.errors import ReplayError
from epicycle.tools.replaying.facts import Facts
from epicycle.tools.replaying.schedule import Held
from epicycle.tools.replaying.sessions import Histories, Said, ids_of, messages_of, text_of
from epicycle.tools.replaying.synthesis import Synthesis
from epicycle.transport.trace_rows import TraceRow

DEFAULT_OUTPUT = 128
LONGEST_PROMPT = 1 << 22  # tokens; beyond any context, and more than should be made up
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}  # whatever a row's extra fields say

Over = Literal["drop", "cap"]
OutputMode = Literal["trace", "exact", "cap"]
ExitTraces = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class BodyOptions:
    """What every request of a run has in common. Lengths of 0 don't limit."""

    salt: str
    max_prompt: int = 0
    max_output: int = 0
    over: Over = "drop"
    output_mode: OutputMode = "trace"
    default_output: int = DEFAULT_OUTPUT
    exit_traces: ExitTraces = "auto"
    pins_sessions: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Outgoing:
    """`route` is completions or chat. `prompt_tokens` is None where only the server can count them."""

    route: str
    body: dict[str, Any]
    said: Said
    prompt_tokens: int | None
    output_tokens: int


class Prompts:
    """Makes requests and keeps what was said. `touched` counts rows that a limit changed or dropped."""

    def __init__(self, options: BodyOptions, facts: Facts, vocabulary: int = 0) -> None:
        self.histories = Histories()
        self.touched: Counter[str] = Counter()
        self._options = options
        self._facts = facts
        size = vocabulary or facts.vocab_size
        self._synthesis = Synthesis(options.salt, size, facts.special_ids) if size else None

    def make(self, held: Held) -> Outgoing | None:
        """The request of a row whose turn has come; None where a limit drops it. Raises ReplayError."""
        row = held.row
        if _made_up_tokens(row) > LONGEST_PROMPT:
            self.touched[f"prompt over {LONGEST_PROMPT} tokens, dropped"] += 1
            return None
        before = self._before(held)
        prompt, said, prompt_tokens = self._prompt(held, before)
        output = self._output(row)
        if prompt_tokens is not None and 0 < self._options.max_prompt < prompt_tokens:
            if not self._may_cut("prompt"):
                return None
            prompt = prompt[: self._options.max_prompt]
            said = Said(None, array("i", prompt))
            prompt_tokens = len(prompt)
        if 0 < self._options.max_output < output:
            if not self._may_cut("output"):
                return None
            output = self._options.max_output
        route = "chat" if row.messages is not None else "completions"
        named = {"messages": prompt} if route == "chat" else {"prompt": prompt}
        body = named | self._fields(held, output)
        return Outgoing(route, body, said, prompt_tokens, int(body.get("max_tokens") or output))

    def answered(self, held: Held, sent: Outgoing, text: str, ids: list[int] | None) -> None:
        """Keep what was said for the rows that go on from here."""
        if not held.session.name and not held.following:
            return
        said = sent.said
        if isinstance(said.own, array):
            said.reply = None if ids is None else array("i", ids)
            if ids is None and held.row.message_mode == "delta":
                self.touched["replies without ids, left out of what follows"] += 1
        else:
            said.reply = text
        self.histories.keep(held.id, said)

    def passed_over(self, held: Held) -> None:
        """The row said nothing (it failed, or a limit dropped it): its conversation goes on from before it."""
        before = self.histories.of(held.parent) if held.parent and not held.row.prefix_reset else None
        if before is not None:
            self.histories.keep(held.id, before)

    def _may_cut(self, what: str) -> bool:
        is_cut = self._options.over == "cap"
        self.touched[f"{what} {'cut' if is_cut else 'too long, dropped'}"] += 1
        return is_cut

    def _before(self, held: Held) -> Said | None:
        row = held.row
        if row.message_mode != "delta" or row.prefix_reset or not held.parent:
            return None
        said = self.histories.of(held.parent)
        if said is None:
            self.touched["history lost"] += 1
        return said

    def _prompt(self, held: Held, before: Said | None) -> tuple[Any, Said, int | None]:
        row = held.row
        if row.messages is not None:
            said = Said(before if before and isinstance(before.own, list) else None, row.messages)
            return messages_of(said), said, None
        if row.text_input is not None:
            said = Said(before if before and isinstance(before.own, str) else None, row.text_input)
            return text_of(said), said, None
        said = self._ids(held, before if before and isinstance(before.own, array) else None)
        ids = ids_of(said)
        return ids.tolist(), said, len(ids)

    def _ids(self, held: Held, before: Said | None) -> Said:
        row = held.row
        if row.token_ids is not None:
            return Said(before, array("i", row.token_ids), kept_tokens=row.prefix_length)
        if self._synthesis is None:
            raise ReplayError("the target doesn't tell its vocabulary, which hashes and lengths need (--vocab-size)")
        if row.hash_ids is not None:
            length = row.input_length or len(row.hash_ids) * row.block_size
            own = self._synthesis.blocks(row.hash_scope, row.hash_ids, row.block_size, length)
            return Said(before, own, kept_tokens=row.prefix_length)
        return self._fresh(held, before, self._synthesis)

    def _fresh(self, held: Held, before: Said | None, synthesis: Synthesis) -> Said:
        """A length alone: tokens of nobody else's, after `prefix_length` tokens of the conversation.

        What the conversation doesn't have yet of its prefix comes from one stream that all of them share, as a system
        prompt would.
        """
        row = held.row
        own = array("i")
        if row.prefix_length:
            have = len(ids_of(before)) if before else 0
            own = synthesis.stream("shared", have, max(0, row.prefix_length - have))
        own += synthesis.stream(f"row {held.id}", 0, row.input_length or 0)
        return Said(before, own, kept_tokens=row.prefix_length)

    def _output(self, row: TraceRow) -> int:
        wanted = self._options.default_output if row.output_length is None else row.output_length
        return max(1, wanted)

    def _fields(self, held: Held, output: int) -> dict[str, Any]:
        row, options, facts = held.row, self._options, self._facts
        mode = row.output_mode if options.output_mode == "trace" else options.output_mode
        body: dict[str, Any] = {"model": facts.model, "max_tokens": output, "temperature": 0.0}
        if facts.takes_ids_back:
            body["return_token_ids"] = True
            body["cache_salt"] = options.salt
        if facts.takes_ids_back and mode == "exact":
            body["ignore_eos"] = True
        if row.tools is not None:
            body["tools"] = row.tools
        if options.pins_sessions and row.session_id and facts.speaks == "epicycle":
            body["session_id"] = row.session_id
        depths = row.exit_depths
        if depths and self._sends_depths():
            body["max_tokens"] = min(output, len(depths))
            body["exit_trace"] = depths[: body["max_tokens"]]
            body["ignore_eos"] = True
        return body | row.extra | options.fields | STREAMED

    def _sends_depths(self) -> bool:
        asked = self._options.exit_traces
        return asked == "always" or (asked == "auto" and self._facts.exit_rule == "trace")


def _made_up_tokens(row: TraceRow) -> int:
    """How many ids a row's own part takes; 0 where it brings its prompt along."""
    if row.hash_ids is not None and row.input_length is None:
        return len(row.hash_ids) * row.block_size
    return (row.input_length or 0) + (row.prefix_length or 0)
