"""What all messages share: the struct options and the version that Hello compares.

`Wire` is the one base; a message states its integer tag in the class line. Tags are unique over the whole package
(`tests/wire` checks), so that any inbox can tell a stray message from its own.
"""

from __future__ import annotations

import msgspec

WIRE_VERSION = 1


class Wire(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=False):
    """Base of every message and of the structs nested in one. Scalars, bytes and flat lists only (gc=False)."""
