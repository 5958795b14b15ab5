"""What a device tick leaves to the machine: how its rows are found, settled, lined up and read.

Owns `TickBackend`, the parts a tick is put together from, with the two seams no other file has, and the plain side:
torch expressions that run anywhere. `tick_kernels` is the other side. It must not know the order of a tick's steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitRule
from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.frame import Frame, FrameAttention, PlainAttention
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.read_out import Greedy, LineUp, PlainLineUp, RunCoda, Sample, plain_greedy, plain_sample
from epicycle.engine.settle import PlainSettle, Settle, TickTensors
from epicycle.engine.slots import SlotTable
from epicycle.engine.tick_inputs import TickInputs, TickShape


class Route(Protocol):
    def __call__(self, slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
        """The rows of a tick as the slots stand now. A decode row is live while its request goes on and its lease
        covers its position; a prompt row unless it is padding."""
        ...


class Enter(Protocol):
    def __call__(self, tokens: Tensor, frame: Frame, held: Tensor | None) -> Tensor:
        """[N, W] states before a loop: the prelude's of tokens [N] for rows at depth 0, `held` [N, W] for the others.
        Without `held` every live row is at depth 0. May write to `held`."""
        ...


class RunPrelude(Protocol):
    def __call__(self, tokens: Tensor, frame: Frame, count: Tensor | None = None) -> Tensor:
        """`LoopedModel.prelude` of the frame's rows; the rest as with `read_out.RunCoda`."""
        ...


class RunLoop(Protocol):
    def __call__(self, state: Tensor, frame: Frame, *, wants_gate: bool = True) -> tuple[Tensor, Tensor | None]:
        """`LoopedModel.loop` of the frame's rows; what comes out for inert rows means nothing, and neither does the
        gate where nobody wants it."""
        ...


@dataclass(frozen=True, slots=True)
class TickBackend:
    attention: FrameAttention
    route: Route
    enter: Enter
    run_loop: RunLoop
    run_coda: RunCoda
    settle: Settle
    line_up: LineUp
    greedy: Greedy
    sample: Sample


def plain_backend(
    model: LoopedModel, pool: KvPool, tensors: TickTensors, rule: ExitRule, needs: RuleEntry
) -> TickBackend:
    """Torch alone. Attention and commits look at the device's flags, which is a wait on a GPU."""
    attention = PlainAttention(pool, tensors.slots.page_table)

    def run_prelude(tokens: Tensor, frame: Frame, count: Tensor | None = None) -> Tensor:
        return model.prelude(tokens, attention.rows(frame))

    def run_coda(state: Tensor, frame: Frame, count: Tensor | None = None) -> Tensor:
        return model.coda(state, attention.rows(frame))

    return TickBackend(
        attention=attention,
        route=plain_route,
        enter=PlainEnter(model.spec, run_prelude),
        run_loop=lambda state, frame, wants_gate=True: model.loop(state, attention.rows(frame)),
        run_coda=run_coda,
        settle=PlainSettle(tensors, rule, needs, PlainCommit(pool)),
        line_up=PlainLineUp(model.spec, tensors, run_coda),
        greedy=plain_greedy,
        sample=plain_sample,
    )


class PlainEnter:
    """Meets `Enter`."""

    def __init__(self, spec: ModelSpec, run_prelude: RunPrelude) -> None:
        self._has_layers = spec.first_recurrent > 0
        self._run_prelude = run_prelude

    def __call__(self, tokens: Tensor, frame: Frame, held: Tensor | None) -> Tensor:
        if held is None:
            return self._run_prelude(tokens, frame)
        starts = frame.depths == 0
        started = self._run_prelude(tokens, frame.only(starts) if self._has_layers else frame)
        return torch.where(starts.unsqueeze(1), started, held)


class PlainCommit:
    """Meets `settle.Commit`."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def __call__(self, slots: SlotTable, frame: Frame, leave: Tensor, done: Tensor) -> None:
        leavers = leave.nonzero().squeeze(1)
        slot, position = frame.slots[leavers], frame.positions[leavers]
        pages = slots.pages_at(slot, position, self._pool.page_tokens)
        self._pool.fill_deeper(pages, position % self._pool.page_tokens, done[leavers], slots.max_loops[slot])


def plain_route(slots: SlotTable, inputs: TickInputs, shape: TickShape) -> Frame:
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
