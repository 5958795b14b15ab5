"""Names of children, the numbers in them, and the kinds of executors."""

from __future__ import annotations

GATEWAY_PREFIX = "gw"


def gateway_number(name: str) -> int | None:
    """The number in a gateway's name (`gw3` is 3); None for other children."""
    digits = name.removeprefix(GATEWAY_PREFIX)
    return int(digits) if name.startswith(GATEWAY_PREFIX) and digits.isdecimal() else None


KIND_OF_ROLE = {"full": "executor", "prefill": "prefill", "decode": "decode"}  # of executors, for the supervisor
EXECUTOR_KINDS = tuple(KIND_OF_ROLE.values())
