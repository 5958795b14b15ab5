"""One row of a replayable trace: the native format of `epicycle replay` and of `epicycle serve --record`.

Owns the row's fields, units and rules, and how it is read from and written to one line of JSON. It is the agentic
Mooncake row with what a looped server adds (exit depths) and what text traces need (messages, ids). It must not know
files, schedules or servers; docs/replay.md describes the format for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from epicycle.transport.errors import TransportError
from epicycle.transport.wire.columns import I32, pack

LONGEST_TOKENS = 1 << 31
LATEST_MS = 1e15  # beyond any epoch in milliseconds; finite, and no infinity passes
LARGEST_HASH = (1 << 63) - 1
DEFAULT_BLOCK = 512
T = TypeVar("T")

Tokens = Annotated[int, Meta(ge=0, le=LONGEST_TOKENS)]
Milliseconds = Annotated[float, Meta(ge=0, le=LATEST_MS)]
BlockHash = Annotated[int, Meta(ge=0, le=LARGEST_HASH)]
TokenId = Annotated[int, Meta(ge=0, le=LONGEST_TOKENS - 1)]
Depth = Annotated[int, Meta(ge=1, le=65535)]


class TraceRowError(TransportError):
    """A row that can't be used. `field` is the one at fault, empty where none is; the text names value and limit."""

    code = "bad_trace_row"

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class TraceRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of a trace. Times in milliseconds, lengths in tokens. Unknown fields are let through to nowhere.

    When: `timestamp` counts from any zero, the same in the whole file. `wait_for` names the rows that must have ended;
    None means the row before it in its session, [] nobody. From their end `delay` + `tool_wait_ms` pass; a row that
    waits for others and has no `delay` isn't sent before its `timestamp` either. `branches` is `wait_for` said from
    the other side: those rows wait for this one.

    What: exactly one of `token_ids`, `messages`, `text_input`, `hash_ids` (equal ids within one `hash_scope` stand for
    equal blocks of `block_size` tokens; the last block is cut to `input_length`), or `input_length` alone (any tokens).
    `message_mode` "delta": only what is new since the session's row before, whose prompt and live reply come first;
    `prefix_length` keeps no more than so many of their tokens; `prefix_reset` keeps none.

    `output_mode` "exact" ignores end-of-sequence ids, "cap" doesn't. `extra` is merged into the request's body.
    `exit_depths` are the loops that each output ran when it was recorded. `meta` is for people.
    """

    request_id: str = ""
    session_id: str = ""
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    tool_wait_ms: Milliseconds = 0.0
    wait_for: list[str] | None = None
    branches: list[str] = []
    prefix_reset: bool = False
    tool_events: list[dict[str, Any]] = []
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[BlockHash] | None = None
    block_size: Annotated[int, Meta(ge=1, le=65536)] = DEFAULT_BLOCK
    hash_scope: str = ""
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[TokenId] | None = None
    message_mode: Literal["history", "delta"] = "history"
    prefix_length: Tokens | None = None
    output_mode: Literal["exact", "cap"] = "exact"
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = {}
    exit_depths: list[Depth] | None = None
    meta: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(TraceRow)
_encoder = msgspec.json.Encoder()
_AT = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_row(line: bytes) -> TraceRow:
    """A row from its line of JSON. Raises TraceRowError."""
    row = decoded(_decoder.decode, line)
    check_row(row)
    return row


def decoded(decode: Callable[[bytes], T], content: bytes) -> T:
    """`content` by a decoder of JSON. Raises TraceRowError."""
    try:
        return decode(content)
    except msgspec.ValidationError as error:
        raise row_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceRowError(f"no valid JSON: {error}") from None
    except RecursionError:
        raise TraceRowError("JSON nested too deeply") from None


def row_error(error: msgspec.ValidationError) -> TraceRowError:
    """The same fault with its field taken out of the text."""
    at = _AT.search(str(error))
    return TraceRowError(_AT.sub("", str(error)), at[1] if at else "")


def check_row(row: TraceRow) -> None:
    """The rules between fields. Raises TraceRowError."""
    prompts = {"token_ids": row.token_ids, "messages": row.messages, "text_input": row.text_input}
    given = [name for name, value in prompts.items() if value is not None]
    given += ["hash_ids"] if row.hash_ids is not None else []
    if len(given) > 1:
        raise TraceRowError(f"a row has one prompt, this one has {' and '.join(given)}", given[1])
    if not given and row.input_length is None:
        raise TraceRowError("no prompt: give token_ids, messages, text_input, hash_ids or input_length", "input_length")
    if given and not prompts.get(given[0], row.hash_ids):
        raise TraceRowError("is empty", given[0])
    if not given and not row.input_length:
        raise TraceRowError("is 0: a prompt has at least one token", "input_length")
    if row.hash_ids is not None and row.input_length is not None:
        _check_blocks(len(row.hash_ids), row.block_size, row.input_length)
    if row.tools is not None and row.messages is None:
        raise TraceRowError("tools need messages", "tools")


def _check_blocks(blocks: int, block_size: int, input_length: int) -> None:
    """As many blocks as the length needs; a trace may leave out the last, partial one."""
    if not (blocks - 1) * block_size < input_length < (blocks + 1) * block_size:
        text = f"{blocks} blocks of {block_size} tokens don't make {input_length} tokens"
        raise TraceRowError(f"{text} (block_size)", "hash_ids")


def encode_row(row: TraceRow) -> bytes:
    """The row's line, newline included. Fields at their defaults are left out."""
    return _encoder.encode(row) + b"\n"


def block_hashes(token_ids: Sequence[int], block_size: int = DEFAULT_BLOCK, key: bytes = b"") -> list[int]:
    """`hash_ids` of a prompt: one for each begun block, chained, so that equal ids mean equal beginnings.

    `key` (up to 64 bytes) keeps prompts from being guessed by whoever reads the hashes.
    """
    chain, hashes = b"", []
    for start in range(0, len(token_ids), block_size):
        block = pack(I32, token_ids[start : start + block_size])
        chain = blake2b(chain + block, digest_size=16, key=key).digest()
        hashes.append(int.from_bytes(chain[:8], "little") & LARGEST_HASH)
    return hashes
