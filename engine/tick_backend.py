"""What a device tick leaves to the machine: finding its rows, one loop of the model, the fill of deeper planes, argmax.

Owns the seam (`TickBackend`) and its plain side, torch expressions that run anywhere; `tick_kernels` is the other. It
must not know the order of a tick's steps.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.frame import Frame, FrameAttention, PlainAttention
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.pool import KvPool
from epicycle.engine.read_out import Greedy, plain_greedy
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import TickInputs, TickShape


class TickBackend(Protocol):
    @property
    def attention(self) -> FrameAttention: ...

    @property
    def greedy(self) -> Greedy: ...

    def route(self, slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
        """The rows of a tick as the slots stand now. A decode row is live while its request goes on and its lease
        covers its position; a prompt row unless it is padding."""
        ...

    def loop(self, model: LoopedModel, state: Tensor, frame: Frame) -> tuple[Tensor, Tensor | None]:
        """`LoopedModel.loop` of the frame's rows; what comes out for inert rows means nothing."""
        ...

    def commit(self, slots: SlotTable, frame: Frame, leave: Tensor, done: Tensor) -> None:
        """Fill the deeper planes of decode rows that leave [B] bool after `done` [B] int64 loops."""
        ...


class PlainBackend:
    """Meets `TickBackend` with torch alone. Attention and commits look at the device's flags."""

    def __init__(self, pool: KvPool, page_table: Tensor) -> None:
        self._pool = pool
        self.attention: FrameAttention = PlainAttention(pool, page_table)
        self.greedy: Greedy = plain_greedy

    def route(self, slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
        return plain_route(slots, inputs, shape)

    def loop(self, model: LoopedModel, state: Tensor, frame: Frame) -> tuple[Tensor, Tensor | None]:
        return model.loop(state, self.attention.rows(frame))

    def commit(self, slots: SlotTable, frame: Frame, leave: Tensor, done: Tensor) -> None:
        leavers = leave.nonzero().squeeze(1)
        slot, position = frame.slots[leavers], frame.positions[leavers]
        pages = slots.pages_at(slot, position, self._pool.page_tokens)
        self._pool.fill_deeper(pages, position % self._pool.page_tokens, done[leavers], slots.max_loops[slot])


def plain_route(slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
    """See `TickBackend.route`."""
    decode = inputs.decode_slots(shape.decode_rows)
    prompt_slots, prompt_positions, prompt_depths, prompt_ends, _ = inputs.prompt_columns(shape.prompt_rows)
    positions, done = slots.position[decode], slots.loops_done[decode]
    is_live = slots.is_decoding[decode] & ((done > 0) | (positions < slots.limit_tokens[decode]))
    all_slots = torch.cat((decode, prompt_slots))
    return Frame(
        decode_rows=shape.decode_rows,
        prompt_rows=shape.prompt_rows,
        slots=all_slots,
        positions=torch.cat((positions, prompt_positions)),
        depths=torch.cat((done, prompt_depths)),
        noise_seeds=slots.noise_seed[all_slots],
        ends=torch.cat((positions + 1, prompt_ends)),
        live=torch.cat((is_live, prompt_slots != slots.sink)),
        chunks=inputs.chunks,
    )
