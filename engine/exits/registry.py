"""Exit rules by name, with what each needs, and the rule a model uses when nobody names one.

Owns the names and the facts; torch-free, so that configuration, `--help` and admission can read it. A rule's module is
imported only by `load`, in the process that computes. Must not know slots, leases or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from epicycle.engine.errors import ExitRuleError

if TYPE_CHECKING:
    from epicycle.engine.exits.base import ExitRule


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """Where a rule lives and what must be there for it."""

    target: str  # "module:Class"
    adaptive: bool = True  # a threshold below 1 means something
    needs_gate: bool = False  # the model must compute its gate logit every loop
    needs_state_before: bool = False  # the state as it entered the loop must still be there after it
    needs_previous_state: bool = False  # the final state of the previous token stays resident per slot
    needs_lookahead_weights: bool = False  # lookahead.safetensors beside the checkpoint
    needs_trace: bool = False  # a listed depth for every output


@dataclass(frozen=True, slots=True)
class RuleSetup:
    """What a rule may be built from; every rule takes the parts it needs."""

    hidden_size: int
    loops: int
    init_std: float = 0.02
    random_seed: int = 0  # in [0, 2**63)
    lookahead_path: Path | None = None
    device: str = "cpu"


_PACKAGE: Final = "epicycle.engine.exits"

RULES: Final[dict[str, RuleEntry]] = {
    "fixed": RuleEntry(f"{_PACKAGE}.fixed:Fixed", adaptive=False),
    "ouro": RuleEntry(f"{_PACKAGE}.ouro:Ouro", needs_gate=True),
    "ouro_delayed": RuleEntry(f"{_PACKAGE}.ouro:OuroDelayed", needs_gate=True),
    "lookahead": RuleEntry(
        f"{_PACKAGE}.lookahead:Lookahead", needs_gate=True, needs_previous_state=True, needs_lookahead_weights=True
    ),
    "random_lookahead": RuleEntry(f"{_PACKAGE}.random_lookahead:RandomLookahead"),
    "trace": RuleEntry(f"{_PACKAGE}.trace:Trace", adaptive=False, needs_trace=True),
    "latent_diff": RuleEntry(f"{_PACKAGE}.latent_diff:LatentDiff", needs_state_before=True),
}

DEFAULT_RULES: Final[dict[str, str]] = {"ouro": "ouro", "huginn_raven": "latent_diff", "nanbeige": "fixed"}


def resolve(name: str | None, model_type: str, has_gate: bool, has_lookahead: bool) -> str:
    """The name of the rule to use; None asks for the model's default. Raises `ExitRuleError`."""
    chosen = DEFAULT_RULES.get(model_type, "fixed") if name is None else name
    if chosen not in RULES:
        raise ExitRuleError("unknown_exit_rule", f"exit rule {chosen!r} is not one of {', '.join(RULES)}")
    entry = RULES[chosen]
    if entry.needs_gate and not has_gate:
        raise ExitRuleError("needs_gate", f"exit rule {chosen!r} needs an exit gate and model {model_type!r} has none")
    if entry.needs_lookahead_weights and not has_lookahead:
        raise ExitRuleError(
            "needs_lookahead", f"exit rule {chosen!r} needs lookahead.safetensors beside the checkpoint"
        )
    return chosen


def load(name: str, setup: RuleSetup) -> ExitRule:
    """Import and build a rule of `RULES`. Raises `LoadError` where its weights don't fit."""
    module, _, class_name = RULES[name].target.partition(":")
    return cast("ExitRule", getattr(import_module(module), class_name).build(setup))
