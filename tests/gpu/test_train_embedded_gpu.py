"""The trainer's GPU path: compiled layers, bfloat16 autocast and the fused optimiser."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from epicycle.tools.train_embedded import main
from tests.fakes.toy_corpus import write_toy_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # torch.compile warns of what it does itself
]


@pytest.mark.parametrize("arch", ["ouro", "huginn"])
def test_a_short_run_on_the_gpu_learns(arch: str, tmp_path: Path) -> None:
    corpus = write_toy_corpus(tmp_path / "corpus", 512)
    flags = {
        "corpus": corpus, "out": tmp_path / "out", "arch": arch, "seconds": 300, "max-steps": 60,
        "hidden-size": 64, "ffn-size": 128, "context-tokens": 128, "batch-rows": 16, "max-train-loops": 8,
        "eval-tokens": 512, "sample-tokens": 8, "layers": 2,
    }  # fmt: skip
    assert main([part for name, value in flags.items() for part in (f"--{name}", str(value))]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    loss = report["final"]["depth_loss"]["mix"][-1] if arch == "ouro" else report["loss_at_r"]["chat"]["8"]
    assert loss < 0.8 * math.log(512)
