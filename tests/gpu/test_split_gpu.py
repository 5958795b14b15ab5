"""Prompts from another engine, and starts at the LM head, have the bits of one engine alone on a GPU."""

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
def test_split_equals_local(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, "--device", "cuda", "--trials", "16", "--outputs", "12", "--longest-prompt", "200"]
    memory = ["--set", f"kv_memory_bytes={1 << 28}"]
    assert 0 == verify.main([*words, *memory, "--conditions", "split", "split-prefix-hits"])
    assert 16 == json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]
