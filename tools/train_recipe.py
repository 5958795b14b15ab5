"""Everything a training run can be told, as one frozen table that the command line is built from.

Owns the names, defaults and help lines of the knobs. Knows nothing about torch, models or files, so that `--help`
stays instant.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints


def _knob(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. Shares are fractions of `seconds`; lengths are tokens; sizes of layers are features."""

    corpus: str = field(metadata={"doc": "corpus archive (tar.xz) or folder made by corpus_prepare", "choices": ()})
    out: str = field(metadata={"doc": "folder for the checkpoint and its records", "choices": ()})
    arch: str = _knob("ouro", "which kind of looped model to train", ("ouro", "huginn"))

    seconds: float = _knob(540.0, "wall-clock budget of the whole run, counted from its start")
    lm_share: float = _knob(0.80, "Ouro: the language model trains until this share of the budget")
    gate_share: float = _knob(0.87, "Ouro: the exit gate trains until this share of the budget")
    lookahead_share: float = _knob(0.92, "Ouro: the lookahead head trains until this share of the budget")
    huginn_share: float = _knob(0.93, "Huginn: the model trains until this share of the budget")
    max_steps: int = _knob(0, "end each stage after this many steps, 0 = by the clock only")
    warm_steps: int = _knob(5, "first steps (compilation) that don't count as progress")
    seed: int = _knob(1, "seed of initial weights, batches and depths")
    device: str = _knob("auto", "torch device; auto = the first GPU, else the CPU")
    compile_layers: bool = _knob(True, "compile layers on a GPU; the CPU always runs them plainly")

    context_tokens: int = _knob(1024, "tokens per training row and largest position the model will know")
    batch_rows: int = _knob(64, "training rows per step")
    mix: str = _knob("", 'JSON of source shares that replaces the corpus own, e.g. {"story": 0.5, "chat": 0.5}')
    max_source_tokens: int = _knob(0, "use only the first tokens of each source, 0 = all")

    hidden_size: int = _knob(256, "width of the residual stream")
    ffn_size: int = _knob(768, "width of the gated MLP")
    heads: int = _knob(4, "attention heads (keys and values have as many)")
    layers: int = _knob(6, "Ouro: layers in the looped stack")
    loops: int = _knob(4, "Ouro: loops of the stack at full depth")
    rope_theta: float = _knob(10_000.0, "Ouro: rotary base")
    prelude_layers: int = _knob(1, "Huginn: layers before the loops")
    core_layers: int = _knob(2, "Huginn: layers in the loop")
    coda_layers: int = _knob(1, "Huginn: layers after the loops")
    mean_loops: int = _knob(8, "Huginn: mean number of loops in training")
    max_train_loops: int = _knob(32, "Huginn: most loops in training")
    traced_loops: int = _knob(4, "Huginn: last loops that gradients flow through")

    adam_lr: float = _knob(3e-3, "AdamW rate for embeddings, head, norms and gate")
    muon_lr: float = _knob(0.01, "Muon rate for the matrices of the layers")
    muon_decay: float = _knob(0.02, "Muon weight decay")
    cooldown_share: float = _knob(0.5, "last share of training with a falling rate")
    entropy_weight: float = _knob(0.1, "Ouro: reward for spread-out exits, halved after half of the training")
    prior_share: float = _knob(0.5, "Ouro: share of the depth weights that is fixed from half-way on (1 at the start)")
    prior_base: float = _knob(3.0, "Ouro: the fixed weight of loop t grows as base^t")
    exit_aware_share: float = _knob(0.5, "Ouro: share of late steps in which tokens leave at random depths")
    exit_aware_from: float = _knob(0.35, "Ouro: progress at which those steps begin")
    gate_lr: float = _knob(0.02, "Ouro: AdamW rate of the exit gate")
    gate_slope: float = _knob(0.0, "Ouro: steepness of the gate's target, 0 = from the loop price")
    loop_price: float = _knob(0.0, "Ouro: what one more loop must save, in nats; 0 = picked for `target_depth`")
    target_depth: float = _knob(2.0, "Ouro: mean depth in hindsight that the picked price should give")
    lookahead_lr: float = _knob(3e-3, "Ouro: AdamW rate of the lookahead head")

    eval_tokens: int = _knob(32_768, "held-out tokens per source in an evaluation")
    eval_rows: int = _knob(32, "rows per evaluation batch")
    sample_tokens: int = _knob(140, "tokens per sample text in the report")
    golden_tokens: int = _knob(40, "most tokens per reference text in the golden files")
    log_every_s: float = _knob(10.0, "seconds between progress lines")

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError("; ".join(problems))


def _problems(recipe: Recipe) -> list[str]:
    checks = (
        (recipe.hidden_size % (2 * recipe.heads) == 0, "hidden_size must be an even multiple of heads"),
        (recipe.loops >= 2, "loops must be at least 2"),
        (recipe.traced_loops >= 1, "traced_loops must be at least 1"),
        (recipe.mean_loops <= recipe.max_train_loops, "mean_loops must not exceed max_train_loops"),
        (
            0 < recipe.lm_share < recipe.gate_share < recipe.lookahead_share <= 1,
            "lm_share < gate_share < lookahead_share must hold within 0..1",
        ),
        (recipe.context_tokens >= 8, "context_tokens must be at least 8"),
    )
    return [text for holds, text in checks if not holds]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of Recipe: `--max-steps`, `--no-compile-layers`, ..."""
    hints = get_type_hints(Recipe)
    for knob in fields(Recipe):
        flag = "--" + knob.name.replace("_", "-")
        required = knob.default is MISSING
        doc = knob.metadata["doc"] + ("" if required else f" (default {knob.default!r})")
        help_text = doc.replace("%", "%%")
        if hints[knob.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=knob.default, help=help_text)
            continue
        parser.add_argument(
            flag,
            type=hints[knob.name],
            required=required,
            default=None if required else knob.default,
            choices=knob.metadata["choices"] or None,
            help=help_text,
        )


def recipe_from(arguments: argparse.Namespace) -> Recipe:
    """Build the recipe from parsed flags. Raises ValueError naming every knob that doesn't fit the others."""
    return Recipe(**{knob.name: getattr(arguments, knob.name) for knob in fields(Recipe)})
