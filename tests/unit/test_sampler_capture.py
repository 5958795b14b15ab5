"""Sampler and exit rules hold nothing a graph can't: they run on tensors that have shapes but no values.

On the meta device a read of a value, a data-dependent shape or a tensor made on another device raises.
"""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.exits.base import ExitRows
from epicycle.engine.exits.lookahead import Lookahead, LookaheadHead
from epicycle.engine.exits.registry import RULES, RuleSetup, load
from epicycle.engine.sampler import sample, stops
from epicycle.engine.sampling import SamplerSteps, SlotSampling

ROWS, VOCAB, HIDDEN, LOOPS = 3, 100, 12, 4


def valueless(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_the_sampler_reads_no_value_on_the_host() -> None:
    columns = SlotSampling(8, VOCAB, bias_cap=2, stop_cap=2, device="meta")
    slots = valueless(ROWS, dtype=torch.int64)
    rows = columns.gather(slots, slots, slots, SamplerSteps())
    sampled = sample(valueless(ROWS, VOCAB), rows, SamplerSteps())
    columns.count(slots, sampled.tokens, stops(sampled.tokens, rows))
    shapes = [tuple(getattr(sampled, name).shape) for name in ("tokens", "logprob", "top_ids", "is_finite")]
    assert shapes == [(ROWS,), (ROWS,), (ROWS, 20), (ROWS,)]


@pytest.mark.parametrize("name", RULES)
def test_exit_rules_read_no_value_on_the_host(name: str) -> None:
    integers = valueless(ROWS, dtype=torch.int64)
    reals, states = valueless(ROWS), valueless(ROWS, HIDDEN, dtype=torch.bfloat16)
    rows = ExitRows(
        loops_done=integers,
        survival=reals,
        pending=integers,
        threshold=reals,
        min_loops=integers,
        max_loops=integers,
        state_after=states,
        state_before=states,
        gate=reals,
        previous_final=states,
        traced_depth=integers,
    )
    if name == "lookahead":
        table = valueless(LOOPS, 5)
        head = LookaheadHead(valueless(2), valueless(5, 2 * HIDDEN), valueless(5), table, table, valueless(LOOPS))
        decision = Lookahead(head).decide(rows)
    else:
        decision = load(name, RuleSetup(hidden_size=HIDDEN, loops=LOOPS, device="meta")).decide(rows)
    dtypes = (decision.leave.dtype, decision.survival.dtype, decision.pending.dtype)
    assert dtypes == (torch.bool, torch.float32, torch.int64)
