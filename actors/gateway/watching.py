"""What may watch a request from its first submit to its end without having a say in it: recordings, request traces.

A request that nobody watches pays for an empty loop. Must not know who watches.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.pieces import Piece
from epicycle.actors.gateway.sequence import Sequence
from epicycle.transport.wire.output import Fin


class Watcher:
    """Every method does nothing here; watchers override what they need. Times are the moment of the call."""

    def on_start(self, sequences: Seq[Sequence]) -> None:
        """The request's choices, none of them submitted yet."""

    def on_submitted(self, sequence: Sequence) -> None: ...

    def on_accepted(self, sequence: Sequence) -> None:
        """It has a slot."""

    def on_piece(self, piece: Piece) -> None: ...

    def on_fin(self, sequence: Sequence, fin: Fin) -> None:
        """The executor's own account of a choice; choices that were cut short here may have none."""

    def on_end(self, cut: str, error: ApiError | None) -> None:
        """Once. `cut` says what became of choices without a finish reason: cancelled or error; empty for a good end."""
