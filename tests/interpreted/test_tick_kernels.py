"""The kernels of a tick beside the model: exit test, fill of deeper planes, noise, argmax; and `TritonOps`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epicycle.engine.exits.base import ExitRows, ExitRule
from epicycle.engine.exits.fixed import Fixed
from epicycle.engine.exits.ouro import Ouro, OuroDelayed
from epicycle.engine.exits.trace import Trace
from epicycle.engine.frame import Frame
from epicycle.engine.kernels import noise, noise_triton
from epicycle.engine.kernels.argmax_triton import argmax
from epicycle.engine.kernels.commit_triton import fill_deeper, plain_fill_deeper
from epicycle.engine.kernels.exit_triton import ExitColumns, Leavers, allocate_leavers, decide
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.kernels.rope_kv_triton import RowAddresses
from epicycle.engine.kernels.triton_ops import TritonOps
from epicycle.engine.tick_backend import PlainEnter
from epicycle.engine.tick_kernels import KernelEnter
from tests.fakes.tiny_models import HUGINN, spec_of

CPU = torch.device("cpu")
RULES: dict[str, ExitRule] = {"fixed": Fixed(), "trace": Trace(), "ouro": Ouro(), "ouro_delayed": OuroDelayed()}


def columns() -> ExitColumns:
    torch.manual_seed(1)

    def whole(low: int, high: int, *more: int) -> Tensor:
        return torch.randint(low, high, (30, *more))

    return ExitColumns(
        survival=torch.rand(30),
        pending=whole(0, 4),
        loops_done=whole(0, 4),
        threshold=torch.cat((torch.rand(25), torch.ones(5))),
        min_loops=whole(1, 3),
        max_loops=whole(1, 5),
        outputs=whole(0, 6),
        trace=whole(1, 5, 6),
    )


@pytest.mark.parametrize("name", RULES)
def test_the_exit_kernel_decides_as_the_rule_does(name: str) -> None:
    slots = torch.randperm(30, generator=torch.Generator().manual_seed(2))[:20].int()
    slots[3] = slots[19] = -1
    gate = torch.randn(20, generator=torch.Generator().manual_seed(3))
    before, after, leavers = columns(), columns(), allocate_leavers(20, CPU)
    decide(name, slots, gate, after, leavers)
    live = (slots >= 0).nonzero().squeeze(1)
    slot = slots[live].long()
    done = before.loops_done[slot] + 1
    assert before.trace is not None
    decision = RULES[name].decide(
        ExitRows(
            loops_done=done,
            survival=before.survival[slot],
            pending=before.pending[slot],
            threshold=before.threshold[slot],
            min_loops=before.min_loops[slot],
            max_loops=before.max_loops[slot],
            state_after=torch.zeros(len(slot), 1),
            gate=gate[live],
            traced_depth=before.trace[slot, before.outputs[slot]],
        )
    )
    assert live[decision.leave].tolist() == leavers.rows[: int(leavers.count)].tolist()
    torch.testing.assert_close(after.survival[slot], decision.survival, atol=2e-7, rtol=0)
    assert torch.equal(decision.pending, after.pending[slot])
    assert torch.equal(done.masked_fill(decision.leave, 0), after.loops_done[slot])
    assert done.tolist() == leavers.done[live].tolist()


def test_leavers_fill_the_planes_that_later_tokens_read() -> None:
    torch.manual_seed(0)
    slots_per_page, starts = 12, torch.tensor([0, 3, 6, 9])
    k = torch.randn(12 * slots_per_page, 4, 2, 24)
    v = torch.randn_like(k)
    table = torch.randperm(12, dtype=torch.int32).view(4, 3)
    slots, positions = torch.tensor([2, 0, 3, 1], dtype=torch.int32), torch.tensor([3, 7, 11, 0], dtype=torch.int32)
    rows = RowAddresses(slots, positions, torch.zeros_like(slots), table, slots_per_page)
    listed, count, done = ([0, 1, 3, 0], [3], [1, 2, 1, 4])
    leavers = Leavers(*(torch.tensor(column, dtype=torch.int32) for column in (listed, count, done)))
    max_loops = torch.tensor([4, 3, 4, 4])
    expected_k, expected_v = k.clone(), v.clone()
    plain_fill_deeper(leavers, rows, max_loops, starts, expected_k, expected_v, 0, 3)
    fill_deeper(leavers, rows, max_loops, starts, k, v, 0, 3)
    assert torch.equal(expected_k, k) and torch.equal(expected_v, v)


def test_noise_has_the_bits_of_its_twin() -> None:
    table = noise.quantile_table(0.01, 72.0)
    seeds, positions = torch.tensor([0, -(2**62) + 5, 2**61 + 3]), torch.tensor([0, 4095, 17])
    expected = noise.draw(table, seeds, positions, 1500)
    assert torch.equal(expected, noise_triton.draw(table, seeds, positions, 1500, torch.float32))


def test_argmax_takes_the_lowest_id_on_ties_and_reports_rows_that_are_not_finite() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 9000)
    logits[1, 8000] = logits[1, 100] = 9.0
    logits[2, 7] = float("nan")
    tokens, finite = argmax(logits)
    assert [int(logits[0].argmax()), 100] == tokens[:2].tolist()
    assert [1, 1, 0] == finite.tolist()
    assert [0, 0] == argmax(logits, torch.tensor([1], dtype=torch.int32))[0][1:].tolist()


def test_the_operations_meet_the_plain_ones() -> None:
    torch.manual_seed(0)
    plain, kernels = PlainOps(), TritonOps()
    x, weight, bias = torch.randn(5, 64).half(), torch.randn(96, 64).half() / 8, torch.randn(96).half()
    heads, angles = torch.randn(5, 9, 16).half(), torch.randn(5, 16)
    table, tokens = torch.randn(7, 16).half(), torch.tensor([3, 3, 0])
    pairs = [
        (plain.linear(x, weight), kernels.linear(x, weight)),
        (plain.linear(x, weight, bias), kernels.linear(x, weight, bias)),
        (plain.logits(x, weight), kernels.logits(x, weight)),
        (plain.rms_norm(x, bias[:64], 1e-6), kernels.rms_norm(x, bias[:64], 1e-6)),
        (plain.silu_mul(x[:, :32], x[:, 32:]), kernels.silu_mul(x[:, :32], x[:, 32:])),
        (plain.add(x, x), kernels.add(x, x)),
        (plain.embed(table, tokens, 3.0), kernels.embed(table, tokens, 3.0)),
        (plain.sigmoid(angles), kernels.sigmoid(angles)),
    ]
    cos, sin = angles.cos(), angles.sin()
    halves = [ops.rope_half(heads[:, :4], cos.half(), sin.half()) for ops in (plain, kernels)]
    turned = [ops.rope_pairs(heads[:, 4:], cos[:, :8], sin[:, :8]) for ops in (plain, kernels)]
    for expected, actual in [*pairs, (halves[0], halves[1]), (turned[0], turned[1])]:
        assert expected.dtype == actual.dtype
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


def test_rows_that_start_a_token_are_lined_up_for_the_prelude_and_put_back() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, sink = torch.randperm(9, generator=generator)[:7], 9
    depths, live = torch.tensor([0, 3, 0, 0, 1, 0, 2]), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    positions, seeds, tokens = (torch.randint(0, 50, (7,), generator=generator) for _ in range(3))
    frame = Frame(7, 0, slots, positions, depths, seeds, positions + 1, live, torch.zeros(2, 1, dtype=torch.int64))
    held = torch.randn(7, 5, generator=generator)
    seen: list[list[int]] = []

    def prelude(tokens: Tensor, frame: Frame, count: Tensor | None = None) -> Tensor:
        seen.append(frame.slots[frame.live].tolist())
        assert count is None or count.item() == frame.live.sum() == frame.live[: int(count)].sum()
        return torch.stack((tokens, frame.positions, frame.noise_seeds, frame.depths, frame.ends), dim=1).float()

    spec = spec_of(HUGINN)
    expected = PlainEnter(spec, prelude)(tokens, frame, held.clone())
    actual = KernelEnter(spec, sink, prelude)(tokens, frame, held.clone())
    assert torch.equal(expected[live], actual[live])
    assert [slots[row].item() for row in (0, 3, 5)] == seen[0] == seen[1]
    inert = frame.only(torch.zeros_like(live))
    assert torch.equal(held, KernelEnter(spec, sink, prelude)(tokens, inert, held.clone()))
    assert [] == seen[2]
