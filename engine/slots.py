"""What stays on the device for every resident request, as tensors with one row per slot.

Owns the columns a tick reads and writes: prompt, next token, position, loops done, exit state, latent state, page
table, bounds, counts, the sampler's columns, and the head rows. Written by the pump between ticks (join, grow) and by
the tick, in stream order and without a wait. One more row, `sink`, belongs to nobody: rows that pad a tick point to it,
and what a tick would write for a row that doesn't run goes there. It must not know who owns a slot, or when it is given
away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epicycle.engine.exits.registry import RuleEntry
from epicycle.engine.heads import HeadRows
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.sampling import SamplingParams, SlotSampling
from epicycle.engine.upload import upload
from epicycle.kvstore.reserve import pages_for
from epicycle.transport.wire.columns import I32, U16, unpack_list
from epicycle.transport.wire.plan import Join
from epicycle.transport.wire.request import Sampling

MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 512


class SlotTable:
    """Columns of `slots` slots and the sink on one device; [slots + 1] int64 unless noted."""

    def __init__(
        self,
        slots: int,
        spec: ModelSpec,
        rule: RuleEntry,
        *,
        context_tokens: int,
        page_tokens: int,
        zero_page: int,
        dtype: torch.dtype,
        device: torch.device,
        heads: HeadRows,
    ) -> None:
        self.device = device
        self.heads = heads
        self.loops = spec.loops
        self.sink = slots
        slots += 1
        self.prompt = torch.zeros(slots, context_tokens, dtype=torch.int64, device=device)
        self.page_table = torch.full(
            (slots, pages_for(context_tokens, page_tokens)), zero_page, dtype=torch.int32, device=device
        )
        self.token = self._column(slots)
        self.position = self._column(slots)  # of `token`
        self.loops_done = self._column(slots)  # of `token`: the depth of its next loop
        self.outputs = self._column(slots)  # sampled so far
        self.min_loops = self._column(slots)
        self.max_loops = self._column(slots)
        self.max_tokens = self._column(slots)
        self.limit_tokens = self._column(slots)  # positions that the lease covers
        self.is_decoding = torch.zeros(slots, dtype=torch.bool, device=device)
        self.ran = self._column(slots)  # loops of `token` after the last tick; 0 where that tick didn't run the row
        self.left = torch.zeros(slots, dtype=torch.bool, device=device)  # `token` took its last loop in that tick
        self.pending = self._column(slots)
        self.noise_seed = self._column(slots)
        self.survival = torch.ones(slots, dtype=torch.float32, device=device)
        self.threshold = torch.ones(slots, dtype=torch.float32, device=device)
        self.state = torch.zeros(slots, spec.state_width, dtype=dtype, device=device)
        # [slots, hidden] final state of the previous token; [slots, context] listed depths: only for rules that ask
        self.previous_final = (
            torch.zeros(slots, spec.hidden_size, dtype=dtype, device=device) if rule.needs_previous_state else None
        )
        self.trace = torch.zeros(slots, context_tokens, dtype=torch.int64, device=device) if rule.needs_trace else None
        self.sampling = SlotSampling(slots, spec.vocab_size, MAX_LOGIT_BIAS, MAX_STOP_IDS, str(device))

    def _column(self, slots: int) -> Tensor:
        return torch.zeros(slots, dtype=torch.int64, device=self.device)

    def join(self, join: Join, prompt: list[int], params: SamplingParams) -> None:
        """Fill a slot's columns for a new request; the tick that samples its first token makes it a decode row."""
        slot, loops = join.slot, join.loops
        most = min(loops.max_loops or self.loops, self.loops)
        self.prompt[slot, : len(prompt)] = upload(prompt, torch.int64, self.device)
        # A fill is launched; an assigned number would be copied from the host, which waits.
        self.is_decoding[slot].fill_(False)
        self.survival[slot].fill_(1.0)
        self.threshold[slot].fill_(loops.exit_threshold)
        numbers = (
            (self.position, 0),
            (self.loops_done, 0),
            (self.outputs, 0),
            (self.pending, 0),
            (self.min_loops, min(loops.min_loops, most)),
            (self.max_loops, most),
            (self.max_tokens, join.sampling.max_tokens),
            (self.limit_tokens, join.limit_tokens),
            (self.noise_seed, join.noise_seed),
        )
        for column, number in numbers:
            column[slot].fill_(number)
        if self.trace is not None:
            listed = unpack_list(U16, loops.exit_trace)[: self.trace.shape[1]]
            self.trace[slot].fill_(self.loops)
            self.trace[slot, : len(listed)] = upload(listed, torch.int64, self.device)
        self.sampling.write(slot, params, prompt)

    def append_pages(self, slot: int, held: int, pages: list[int]) -> None:
        """Put `pages` behind the `held` ones that the slot's table has."""
        self.page_table[slot, held : held + len(pages)] = upload(pages, torch.int32, self.device)

    def pages_at(self, slots: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
        """[N] the pages that hold `positions` [N] of `slots` [N]."""
        return self.page_table[slots, torch.div(positions, page_tokens, rounding_mode="floor")]


def slot_bytes(spec: ModelSpec, context_tokens: int, dtype_bytes: int) -> int:
    """Bytes of one slot's row in every table, rounded up over the few scalar columns."""
    histories = 2 * 8 * context_tokens + 4 * context_tokens  # prompt, trace, page table at one token a page
    states = (spec.state_width + 3 * spec.hidden_size) * dtype_bytes  # previous state and head row among them
    return histories + states + 5 * spec.vocab_size + 12 * MAX_LOGIT_BIAS + 8 * MAX_STOP_IDS + 512


def sampling_params(sampling: Sampling) -> SamplingParams:
    """The sampler's view of a request's wire struct."""
    ids = unpack_list(I32, sampling.logit_bias_ids)
    values = torch.frombuffer(bytearray(sampling.logit_bias_values), dtype=torch.float32).tolist() if ids else []
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed % (1 << 64),
        choice=sampling.choice,
        min_tokens=sampling.min_tokens,
        logit_bias=dict(zip(ids, values, strict=True)),
        stop_ids=tuple(unpack_list(I32, sampling.stop_ids)),
        alternatives=max(0, sampling.logprobs),
    )
