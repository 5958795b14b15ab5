"""The models on a GPU: noise has the host's bits, embedded models agree with the host, a published shape builds."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kernels import noise
from epicycle.engine.kernels.plain import PlainOps
from epicycle.engine.models.base import LoopedModel
from epicycle.engine.models.build import build_model
from epicycle.engine.models.loader import random_weights
from epicycle.engine.models.locate import locate
from tests.fakes.tiny_models import OURO, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def embedded(name: str, device: torch.device) -> LoopedModel:
    return build_model(
        locate(name), dtype=torch.bfloat16, device=device, weights="checkpoint", ops=PlainOps(), start_state="noise"
    )


class OwnValueRows:
    """Rows whose attention returns their own v: what is left of a model without any history."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.positions = torch.arange(count, device=device)
        self.depths = torch.zeros_like(self.positions)
        self.noise_seeds = torch.full_like(self.positions, 5)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v + 0.01 * (q + k)

    attend_once = attend


def test_noise_has_the_same_bits_on_host_and_device() -> None:
    table = noise.quantile_table(0.0087, 72.66)
    seeds, positions = torch.arange(-3, 4), torch.arange(4000, 4007)
    host = noise.draw(table, seeds, positions, 5280)
    assert torch.equal(host, noise.draw(table.to(GPU), seeds.to(GPU), positions.to(GPU), 5280).cpu())


@pytest.mark.parametrize("name", ["embedded:ouro", "embedded:huginn"])
def test_embedded_models_agree_with_the_host(name: str) -> None:
    logits = []
    for device in (CPU, GPU):
        model, rows = embedded(name, device), OwnValueRows(12, device)
        state = model.prelude(torch.arange(12, device=device), rows)
        for _ in range(2):
            state, _ = model.loop(state, rows)
        logits.append(model.head(model.coda(state, rows)).cpu())
    assert ((logits[0] - logits[1]).norm() / logits[0].norm()).item() < 0.05


def test_random_weights_repeat_on_the_device() -> None:
    spec = spec_of(OURO)
    first, second = (random_weights(spec, seed=4, dtype=torch.bfloat16, device=GPU) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_published_shape_builds_and_loops() -> None:
    files = locate("ouro-1.4b", "random")
    model = build_model(files, dtype=torch.bfloat16, device=GPU, weights="random", ops=PlainOps(), seed=1)
    rows = OwnValueRows(4, GPU)
    state, gate = model.loop(model.prelude(torch.arange(4, device=GPU), rows), rows)
    assert gate is not None
    assert ((4, 2048), (4,), True) == (state.shape, gate.shape, bool(gate.isfinite().all()))
