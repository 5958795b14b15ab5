"""A TokenBatch being filled, one row a token: what every pump writes its step into.

Owns the columns and their packing. It must not know requests, slots or gateways.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epicycle.transport.wire.columns import F32, I32, U16, U64, pack
from epicycle.transport.wire.output import TokenBatch


@dataclass(slots=True)
class TokenColumns:
    """One row a token, since a tick makes at most one for each request. `logprob_k` is -1 where none were asked."""

    rids: list[int] = field(default_factory=list)
    first_index: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logprob_k: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def pack(self, epoch: int) -> TokenBatch:
        """The message. At least one row has been added."""
        return TokenBatch(
            epoch=epoch,
            rids=pack(U64, self.rids),
            first_index=pack(I32, self.first_index),
            counts=pack(I32, [1] * len(self.rids)),
            tokens=pack(I32, self.tokens),
            exit_depths=pack(U16, self.exit_depths),
            logprob_k=pack(I32, self.logprob_k) if max(self.logprob_k) >= 0 else b"",
            logprobs=pack(F32, self.logprobs),
            top_ids=pack(I32, self.top_ids),
            top_logprobs=pack(F32, self.top_logprobs),
        )
