"""The order of the stages for each architecture, and which files are written when.

Owns nothing else: the stages own their maths, train_run their surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epicycle.tools import train_files
from epicycle.tools.train_blocks import round_to_bfloat16
from epicycle.tools.train_gate import train_gate
from epicycle.tools.train_golden import huginn_golden, ouro_golden, ouro_serving_golden
from epicycle.tools.train_huginn import HuginnModel, HuginnShape
from epicycle.tools.train_language import train_huginn_language, train_ouro_language
from epicycle.tools.train_lookahead import lookahead_quality, train_lookahead
from epicycle.tools.train_measure import measure_huginn, measure_ouro
from epicycle.tools.train_ouro import OuroModel, OuroShape
from epicycle.tools.train_run import Run
from epicycle.tools.train_samples import huginn_samples, ouro_samples

# torch.compile specialises per sequence length and exit-aware form; the default limit is lower.
RECOMPILE_LIMIT = 64


def run_ouro(run: Run) -> None:
    """Language model, then gate, then lookahead head; each stage freezes what came before."""
    model = OuroModel(_ouro_shape(run)).to(run.device)
    report = _begin(run, model)
    report |= train_ouro_language(run, model)
    _freeze(model)
    train_files.save_ouro_config(run.out, model.shape, run.recipe.context_tokens)
    train_files.save_tensors(model, run.out / "model.safetensors")  # kept if the budget ends in a later stage
    report["after_stage1"] = measure_ouro(run, model, "language model")
    report["stage2"] = train_gate(run, model)
    _freeze(model)
    report["final"] = measure_ouro(run, model, "final")
    head, steps = train_lookahead(run, model)
    report["stage3"] = {"steps": steps, "quality": lookahead_quality(run, model, head)}
    train_files.save_tensors(model, run.out / "model.safetensors")
    train_files.save_tensors(head, run.out / "lookahead.safetensors")
    report |= ouro_samples(run, model)
    _use_float32(model)
    words, limit = run.tokenizer, run.recipe.golden_tokens
    train_files.save_json(run.out / "golden.json", ouro_golden(model, words, limit))
    train_files.save_json(run.out / "golden_serving.json", ouro_serving_golden(model, words, limit))
    train_files.save_json(run.out / "report.json", report, indent=1)


def run_huginn(run: Run) -> None:
    """One stage: the model with random loop counts."""
    model = HuginnModel(_huginn_shape(run)).to(run.device)
    report = _begin(run, model)
    report |= train_huginn_language(run, model)
    _freeze(model)
    train_files.save_huginn_config(run.out, model.shape, run.recipe)
    train_files.save_tensors(model, run.out / "model.safetensors")
    report |= measure_huginn(run, model)
    report |= huginn_samples(run, model)
    _use_float32(model)
    words, limit = run.tokenizer, run.recipe.golden_tokens
    train_files.save_json(run.out / "golden.json", huginn_golden(model, words, limit))
    train_files.save_json(run.out / "report.json", report, indent=1)


RUNS: dict[str, Callable[[Run], None]] = {"ouro": run_ouro, "huginn": run_huginn}


def _begin(run: Run, model: OuroModel | HuginnModel) -> dict[str, Any]:
    model.activation_dtype = run.activation_dtype()
    if run.compiles():
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        model.compile_layers()
    params = sum(parameter.numel() for parameter in model.parameters())
    run.journal.say(f"{run.recipe.arch}-style model of {params:,} parameters, {2 * params:,} bytes in bfloat16")
    return {"args": train_files.recipe_record(run.recipe), "params": params}


def _freeze(model: OuroModel | HuginnModel) -> None:
    """Round to what is shipped, stop gradients, and drop the compiled path: later batches have other shapes."""
    round_to_bfloat16(model)
    model.requires_grad_(False)
    model.compiled = False


def _use_float32(model: OuroModel | HuginnModel) -> None:
    torch.set_float32_matmul_precision("highest")
    model.activation_dtype = torch.float32


def _ouro_shape(run: Run) -> OuroShape:
    recipe = run.recipe
    return OuroShape(
        vocab_size=run.tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        ffn_size=recipe.ffn_size,
        layers=recipe.layers,
        heads=recipe.heads,
        loops=recipe.loops,
        rope_theta=recipe.rope_theta,
    )


def _huginn_shape(run: Run) -> HuginnShape:
    recipe = run.recipe
    return HuginnShape(
        vocab_size=run.tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        ffn_size=recipe.ffn_size,
        heads=recipe.heads,
        prelude_layers=recipe.prelude_layers,
        core_layers=recipe.core_layers,
        coda_layers=recipe.coda_layers,
        mean_loops=recipe.mean_loops,
    )
