"""Products that a card refuses aren't chosen; where nothing can be timed, the start ends and says why."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kernels import product_probe
from epicycle.engine.kernels.candidates import sure
from epicycle.engine.kernels.product_probe import ProductProbe
from epicycle.engine.kernels.products import LIBRARY, Product

PLAIN = Product("plain", 64, 64)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ProductProbe:
    """One for which every time fails."""

    def refuse(*given: object) -> float:
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(product_probe, "graph_us", refuse)
    made = ProductProbe(16, torch.float32, torch.device("cpu"))
    made._held = PLAIN.name, torch.ones(16, 64), [torch.ones(64, 64)], torch.ones(16, 64)
    return made


def test_what_is_refused_takes_for_ever(probe: ProductProbe) -> None:
    assert float("inf") == probe.time_us(PLAIN, LIBRARY, 16)


def test_the_sure_one_must_have_a_time(probe: ProductProbe) -> None:
    with pytest.raises(RuntimeError, match="no graphs here"):
        probe.time_us(PLAIN, sure(PLAIN), 16)
