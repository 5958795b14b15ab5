"""One encoder and one decoder per inbox: msgpack through msgspec, a size cap, and an error that names the cause.

Nothing else in the package turns bytes into objects. A frame that doesn't decode raises WireError; the receiver counts
and drops it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from epicycle.transport.errors import WireError
from epicycle.transport.wire.base import Wire

MAX_FRAME_BYTES = 64 << 20
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Wire) -> bytes:
    """The frame of `message`. Raises WireError when it is over the cap (the peer would refuse it)."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes is over the frame limit of {MAX_FRAME_BYTES}")
    return frame


class Decoder(Generic[M]):
    """Decodes one closed union; anything else is a WireError."""

    def __init__(self, union: type[M] | object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> M:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested without end
            raise WireError(f"undecodable frame of {len(frame)} bytes: {error}") from error
