"""The engine's models equal the dense references in float32, at every depth, chunk size and mix of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels import noise
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.build import assemble
from tests.fakes.driver import logits_by_depth, prefill, serve
from tests.fakes.rows import DenseRows, SequenceCache
from tests.fakes.tiny_models import CONFIGS, lively_weights, spec_of
from tests.reference import huginn_dense, nanbeige_dense, ouro_dense

IDS = [5, 17, 60, 3, 3, 41, 22, 8, 0]
KINDS = sorted(CONFIGS)


def build(kind: str, start_state: str = "zero", seed: int = 0) -> tuple[LoopedModel, dict[str, Tensor]]:
    spec = spec_of(CONFIGS[kind])
    weights = lively_weights(spec, seed)
    return assemble(spec, dict(weights), PlainOps(), start_state), weights


def dense_logits(kind: str, weights: dict[str, Tensor], ids: list[int]) -> list[Tensor]:
    config = CONFIGS[kind]
    if kind == "ouro":
        return [ouro_dense.logits(weights, depth.state) for depth in ouro_dense.run(config, weights, ids)]
    dense = huginn_dense if kind == "huginn_raven" else nanbeige_dense
    return [dense.logits(weights, x) for x in dense.run(config, weights, ids)]


def close(expected: Tensor, actual: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3, -1])
def test_logits_equal_the_dense_reference(kind: str, depth: int) -> None:
    model, weights = build(kind)
    index = depth - 1 if depth > 0 else -1
    close(dense_logits(kind, weights, IDS)[index], logits_by_depth(model, IDS)[index])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_chunked_prefill_equals_the_whole(kind: str, chunk: int) -> None:
    model, weights = build(kind)
    x = prefill(model, SequenceCache(model.spec, len(IDS)), IDS, chunk)
    close(dense_logits(kind, weights, IDS)[-1], model.head(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_two_sequences_at_mixed_depths_keep_their_values(kind: str) -> None:
    model, weights = build(kind)
    first, second = SequenceCache(model.spec, len(IDS)), SequenceCache(model.spec, len(IDS))
    prefill(model, first, IDS[:4])
    rows = DenseRows([second, first], [0, 4], [0, 0])
    states = model.prelude(torch.tensor([IDS[0], IDS[4]]), rows)
    ahead, _ = model.loop(states[1:], DenseRows([first], [4], [0]))
    for depth in range(model.spec.loops - 1):  # the second row runs one loop ahead of the first
        rows.depths = torch.tensor([depth, depth + 1])
        mixed, _ = model.loop(torch.cat((states[:1], ahead)), rows)
        states, ahead = mixed[:1], mixed[1:]
    last = model.coda(ahead, DenseRows([first], [4], [model.spec.loops - 1]))
    close(dense_logits(kind, weights, IDS[:5])[-1][4:], model.head(last))
    states, _ = model.loop(states, DenseRows([second], [0], [model.spec.loops - 1]))
    start = model.coda(states, DenseRows([second], [0], [model.spec.loops - 1]))
    close(dense_logits(kind, weights, IDS[:1])[-1], model.head(start))


def test_gate_logits_equal_the_dense_reference() -> None:
    model, weights = build("ouro")
    rows = DenseRows([SequenceCache(model.spec, len(IDS))] * len(IDS), list(range(len(IDS))), [0] * len(IDS))
    _, gate = model.loop(model.prelude(torch.tensor(IDS), rows), rows)
    close(ouro_dense.run(CONFIGS["ouro"], weights, IDS)[0].gate, gate)


@pytest.mark.parametrize("kind", ["huginn_raven", "nanbeige"])
def test_models_without_a_gate_return_none(kind: str) -> None:
    model, _ = build(kind)
    rows = DenseRows([SequenceCache(model.spec, 1)], [0], [0])
    assert model.loop(model.prelude(torch.tensor([1]), rows), rows)[1] is None


@pytest.mark.parametrize(("threshold", "bounds"), [(1.0, (1, 4)), (0.5, (1, 4)), (0.6, (2, 4)), (0.7, (1, 3))])
def test_serving_equals_dense_last_exited_generation(threshold: float, bounds: tuple[int, int]) -> None:
    model, weights = build("ouro")
    low, high = bounds
    ours = serve(model, IDS, count=24, threshold=threshold, min_loops=low, max_loops=high)
    dense = ouro_dense.generate(
        CONFIGS["ouro"], weights, IDS, count=24, threshold=threshold, min_loops=low, max_loops=high
    )
    assert (dense.ids, dense.exit_depths) == (ours.ids, ours.exit_depths)


def test_the_exit_rule_is_exercised_at_several_depths() -> None:
    model, _ = build("ouro")
    assert len(set(serve(model, IDS, count=24, threshold=0.5).exit_depths[1:])) >= 3


def test_huginn_starts_from_the_noise_of_its_seed() -> None:
    model, weights = build("huginn_raven", "noise")
    spec = model.spec
    table = noise.quantile_table(spec.init_std, spec.embed_scale)
    start = noise.draw(table, torch.full((len(IDS),), 7), torch.arange(len(IDS)), spec.hidden_size)
    dense = huginn_dense.run(CONFIGS["huginn_raven"], weights, IDS, start)
    close(huginn_dense.logits(weights, dense[-1]), logits_by_depth(model, IDS, noise_seed=7)[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32(kind: str) -> None:
    spec = spec_of(CONFIGS[kind])
    narrow = {name: tensor.bfloat16() for name, tensor in lively_weights(spec).items()}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    expected = logits_by_depth(assemble(spec, wide, PlainOps(), "zero"), IDS)[-1]
    model = assemble(spec, narrow, PlainOps(), "zero")
    actual = logits_by_depth(model, IDS)[-1]
    assert torch.float32 == actual.dtype
    assert (actual - expected).norm() / expected.norm() < 0.1
