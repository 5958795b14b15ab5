"""The registry of exit rules and the loading of a trained lookahead head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from epicycle.engine.errors import ExitRuleError, LoadError
from epicycle.engine.exits.lookahead import Lookahead
from epicycle.engine.exits.registry import DEFAULT_RULES, RULES, RuleSetup, load, resolve

HIDDEN, LOOPS, INNER = 8, 4, 5


def head_tensors() -> dict[str, torch.Tensor]:
    return {
        "fc1.weight": torch.randn(INNER, 2 * HIDDEN),
        "fc1.bias": torch.randn(INNER),
        "step_embed.weight": torch.randn(LOOPS, INNER),
        "fc2.weight": torch.randn(LOOPS, INNER),
        "fc2.bias": torch.randn(LOOPS),
        "in_scale": torch.randn(2),
    }


def setup(path: Path | None = None) -> RuleSetup:
    return RuleSetup(hidden_size=HIDDEN, loops=LOOPS, lookahead_path=path)


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if not entry.needs_lookahead_weights])
def test_every_rule_loads_by_name(name: str) -> None:
    assert type(load(name, setup())).__name__ == RULES[name].target.partition(":")[2]


def test_the_registry_reads_without_torch() -> None:
    code = "import sys, epicycle.engine.exits.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("model_type", "has_gate"), [("ouro", True), ("huginn_raven", False), ("nanbeige", False)])
def test_a_model_gets_its_default_rule(model_type: str, has_gate: bool) -> None:
    assert resolve(None, model_type, has_gate, has_lookahead=False) == DEFAULT_RULES[model_type]


@pytest.mark.parametrize(
    ("name", "has_gate", "has_lookahead", "code"),
    [
        ("nearest", True, True, "unknown_exit_rule"),
        ("ouro", False, False, "needs_gate"),
        ("lookahead", True, False, "needs_lookahead"),
    ],
)
def test_a_rule_that_cannot_be_fed_is_refused_by_name(
    name: str, has_gate: bool, has_lookahead: bool, code: str
) -> None:
    with pytest.raises(ExitRuleError, match=name) as refused:
        resolve(name, "ouro", has_gate, has_lookahead)
    assert refused.value.code == code


def test_a_saved_head_loads_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "lookahead.safetensors"
    tensors = head_tensors()
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path)
    rule = load("lookahead", setup(path))
    assert isinstance(rule, Lookahead)
    assert torch.equal(rule.head.inner, tensors["fc1.weight"].to(torch.bfloat16).float())
    assert torch.equal(rule.head.step, tensors["step_embed.weight"].to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fc2.bias": None}, "missing_tensor"),
        ({"fc1.bias": None}, "missing_tensor"),
        ({"fc3.bias": torch.zeros(1)}, "unknown_tensor"),
        ({"fc2.weight": torch.zeros(LOOPS + 1, INNER)}, "wrong_shape"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, torch.Tensor | None], code: str) -> None:
    path = tmp_path / "lookahead.safetensors"
    tensors = head_tensors() | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(LoadError, match=next(iter(change))) as refused:
        load("lookahead", setup(path))
    assert refused.value.code == code


def test_an_unreadable_head_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lookahead.safetensors"
    with pytest.raises(LoadError, match=str(path)):
        load("lookahead", setup(path))
