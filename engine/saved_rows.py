"""What a slot holds of a row that no message repeats: where its token stands, its states, what it has said.

Owns which columns of the slot table these are. The rest of a slot follows from the request itself (`SlotTable.join`).
A row may be saved between any two loops of its token. It must not know pages, or why a row leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epicycle.engine.slots import SlotTable
from epicycle.engine.upload import download


@dataclass(frozen=True, slots=True)
class SavedColumns:
    """On the host, complete once everything launched before `save_columns` is. `output_counts` only for penalties."""

    token: Tensor
    position: Tensor
    loops_done: Tensor
    outputs: Tensor
    pending: Tensor
    survival: Tensor
    state: Tensor
    previous_final: Tensor | None
    output_counts: Tensor | None


def save_columns(slots: SlotTable, slot: int, *, penalises: bool) -> SavedColumns:
    """The slot's columns as everything launched so far leaves them."""
    return SavedColumns(
        token=download(slots.token[slot]),
        position=download(slots.position[slot]),
        loops_done=download(slots.loops_done[slot]),
        outputs=download(slots.outputs[slot]),
        pending=download(slots.pending[slot]),
        survival=download(slots.survival[slot]),
        state=download(slots.state[slot]),
        previous_final=download(slots.previous_final[slot]) if slots.previous_final is not None else None,
        output_counts=download(slots.sampling.output_counts[slot]) if penalises else None,
    )


def restore_columns(slots: SlotTable, slot: int, saved: SavedColumns, *, is_decoding: bool) -> None:
    """Into a slot that its request has joined anew. Nobody waits."""
    pairs = [
        (slots.token, saved.token),
        (slots.position, saved.position),
        (slots.loops_done, saved.loops_done),
        (slots.outputs, saved.outputs),
        (slots.pending, saved.pending),
        (slots.survival, saved.survival),
        (slots.state, saved.state),
    ]
    if saved.previous_final is not None:
        assert slots.previous_final is not None
        pairs.append((slots.previous_final, saved.previous_final))
    if saved.output_counts is not None:
        pairs.append((slots.sampling.output_counts, saved.output_counts))
    for column, value in pairs:
        column[slot].copy_(value, non_blocking=True)
    slots.is_decoding[slot].fill_(is_decoding)
