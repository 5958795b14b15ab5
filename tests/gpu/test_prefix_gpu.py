"""Cached prompts have the bits of cold ones on a GPU: partial hits, whole repeats, chunks, ticks ahead, company."""

from __future__ import annotations

import json

import pytest
import torch

from epicycle.tools import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("model", ["embedded:ouro", "embedded:huginn"])
def test_prefix_hits_equal_cold_runs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, "--device", "cuda", "--trials", "16", "--outputs", "12", "--longest-prompt", "200"]
    assert 0 == verify.main([*words, "--conditions", "prefix-hits", "prefix-hits-chunk-64"])
    text = capsys.readouterr().out
    assert 16 == json.loads(text.splitlines()[-1])["trials"]
    assert " 0 prompt tokens cached" not in text
