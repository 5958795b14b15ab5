"""Embeddable client <-> gateway: the HTTP surface over ZeroMQ, without HTTP.

The request body is the JSON body of /v1/completions or /v1/chat/completions, so that one validator serves both; the
gateway tokenizes. Events carry what an SSE chunk carries, typed.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire


class Generate(Wire, frozen=True, tag=60):
    """`ref` is the client's own number, unique on its connection. `kind`: completions or chat. `body`: JSON bytes.

    `traceparent` is the W3C header, empty where the client doesn't trace.
    """

    ref: int
    kind: str
    body: bytes
    traceparent: str = ""


class Abort(Wire, frozen=True, tag=61):
    ref: int


class Event(Wire, frozen=True, tag=62):
    """New output of one choice: text (may be empty), its ids (I32), exit depths (U16), logprobs as JSON bytes.

    `finish_reason` is empty until the choice's last event. `prompt_ids` (I32) only in a choice's first event.
    """

    ref: int
    index: int
    text: str
    token_ids: bytes
    exit_depths: bytes
    finish_reason: str = ""
    stop_reason: str = ""
    logprobs: bytes = b""
    prompt_ids: bytes = b""


class Done(Wire, frozen=True, tag=63):
    """Terminal of a request that ended well. `usage` is the JSON of the HTTP body's usage object."""

    ref: int
    usage: bytes


class Failed(Wire, frozen=True, tag=64):
    """Terminal of one that did not; fields as in the HTTP error body."""

    ref: int
    status: int
    code: str
    message: str
    param: str = ""


FromClient = Generate | Abort
ToClient = Event | Done | Failed
