"""Reference outputs that ship beside a checkpoint, computed in float32 on the rounded weights without any cache.

Owns the format of golden.json and golden_serving.json. The engine's tests compare themselves with these files, so
nothing here may use the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from epicycle.tools.train_blocks import head_logits
from epicycle.tools.train_huginn import HuginnModel
from epicycle.tools.train_ouro import ExitRule, OuroModel, decode
from epicycle.tools.train_samples import Written, chat_prompt, encode, huginn_next, ouro_next, write

TOP = 5
STORY = "Once upon a time, there was a little girl named"
CAPITAL = chat_prompt(["What is the capital of France?"])
OURO_TEXTS = (STORY, CAPITAL, chat_prompt(["What is 7 plus 5?"]))
HUGINN_TEXTS = (STORY, CAPITAL, "The sea was calm and", chat_prompt(["What is 34 + 52?"]))
SERVING_TEXTS = (
    STORY,
    CAPITAL,
    chat_prompt(["How do I make tea?"]),
    chat_prompt(["Tell me a story about a fox named Pip."]),
    chat_prompt(["What does happy mean?"]),
)
# 2.0 is the historic spelling of "never early" in golden.json.
GOLDEN_THRESHOLDS = (0.5, 0.7, 0.9, 2.0)
HUGINN_LOOPS = (1, 2, 4, 8)

OURO_NOTE = (
    "float32 arithmetic on bf16-rounded weights, no cache. lambda = sigmoid of the gate per loop and position; top5 = "
    "(id, logit) at the last position after each loop, tolerance 2e-3. greedy_qX = greedy under the exit rule at "
    "threshold X (2.0 = never early) with min_loops 1, where prompt tokens leave by the rule too (prompt_depths). "
    "Serving runs prompts at full depth: see golden_serving.json."
)
SERVING_NOTE = (
    "float32 arithmetic on bf16-rounded weights, serving semantics: prompt tokens run full depth; a generated token "
    "leaves after loop k when 1 - prod(1 - sigmoid(gate)) >= exit_threshold and k >= min_loops, or at max_loops; "
    "threshold 1.0 never leaves early; a query at loop d reads version min(d, e) of a token that left at e "
    "(last_exited). exit_depths[i] = loops of the token whose state produced ids[i], the first being the last prompt "
    "token. Greedy; ids end with the stop token (0 or 2) if one came. Where smallest_top2_margin is below 1e-3 another "
    "correct order of float32 sums may pick the other token."
)
HUGINN_NOTE = (
    "float32 arithmetic on bf16-rounded weights, no cache, zero start state at every position (serving starts from "
    "noise). top5 = (id, logit) at the last position after r loops, tolerance 2e-3; greedy_rN = greedy continuation "
    "at N loops, without the start-state noise."
)


def serving_runs(loops: int) -> tuple[tuple[float, int, int], ...]:
    """(exit_threshold, min_loops, max_loops) that golden_serving.json covers, for a model of that many loops."""
    low = min(2, loops)
    runs = ((1.0, low, loops), (0.5, 1, loops), (0.5, low, loops), (0.7, 1, loops), (0.9, low, loops))
    return (*runs, (0.7, 1, loops - 1), (1.0, 1, low))


@torch.no_grad()
def ouro_golden(model: OuroModel, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    """golden.json of an Ouro-style model. The model must be in float32."""
    cases = [_ouro_case(model, tokenizer, text, max_tokens) for text in OURO_TEXTS]
    return {"note": OURO_NOTE, "cases": cases}


def _ouro_case(model: OuroModel, tokenizer: Tokenizer, text: str, max_tokens: int) -> dict[str, Any]:
    prompt = encode(tokenizer, text)
    ids = torch.tensor([prompt], device=model.lm_head.weight.device)
    states = model.all_depths(ids)
    odds = [torch.sigmoid(model.gate_logits(state))[0].tolist() for state in states]
    case: dict[str, Any] = {
        "text": text,
        "ids": prompt,
        "lambda": [[round(value, 5) for value in loop] for loop in odds],
        "top5": [_top(head_logits(state[0, -1], model.lm_head.weight)) for state in states],
    }
    for threshold in GOLDEN_THRESHOLDS:
        case[f"greedy_q{threshold}"] = _greedy_entry(model, tokenizer, ids, threshold, max_tokens)
    return case


def _greedy_entry(
    model: OuroModel, tokenizer: Tokenizer, ids: Tensor, threshold: float, max_tokens: int
) -> dict[str, Any]:
    rule = ExitRule(threshold, 1, model.shape.loops)
    written = write(ouro_next(model, lambda _: rule), ids[0].tolist(), max_tokens, ids.device)
    return {
        "ids": written.text_ids,
        "depths": written.depths,
        "text": tokenizer.decode(written.text_ids, skip_special_tokens=False),
        "prompt_depths": decode(model, ids, rule).depth[0].tolist(),
    }


@torch.no_grad()
def ouro_serving_golden(model: OuroModel, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    """golden_serving.json of an Ouro-style model. The model must be in float32."""
    cases = []
    for text in SERVING_TEXTS:
        prompt = encode(tokenizer, text)
        runs = [serve_greedily(model, prompt, max_tokens, *bounds) for bounds in serving_runs(model.shape.loops)]
        entries = [
            _serving_entry(tokenizer, written, bounds)
            for written, bounds in zip(runs, serving_runs(model.shape.loops), strict=True)
        ]
        cases.append({"text": text, "prompt_ids": prompt, "runs": entries})
    return {"note": SERVING_NOTE, "cases": cases}


def serve_greedily(
    model: OuroModel, prompt: list[int], max_tokens: int, threshold: float, min_loops: int, max_loops: int
) -> Written:
    """Greedy continuation under serving semantics: the prompt at full depth, the rest by rule and bounds."""
    full = model.shape.loops

    def rule(ids: Tensor) -> ExitRule:
        is_prompt = torch.arange(ids.shape[1], device=ids.device)[None] < len(prompt)
        return ExitRule(threshold, torch.where(is_prompt, full, min_loops), torch.where(is_prompt, full, max_loops))

    return write(ouro_next(model, rule), prompt, max_tokens, model.lm_head.weight.device)


def _serving_entry(tokenizer: Tokenizer, written: Written, bounds: tuple[float, int, int]) -> dict[str, Any]:
    threshold, min_loops, max_loops = bounds
    return {
        "exit_threshold": threshold,
        "min_loops": min_loops,
        "max_loops": max_loops,
        "ids": written.ids,
        "exit_depths": written.depths,
        "text": tokenizer.decode(written.text_ids, skip_special_tokens=False),
        "smallest_top2_margin": round(written.smallest_margin, 4),
    }


@torch.no_grad()
def huginn_golden(model: HuginnModel, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    """golden.json of a Huginn-style model. The model must be in float32."""
    loops = HUGINN_LOOPS[-1]
    cases = []
    for text in HUGINN_TEXTS:
        prompt = encode(tokenizer, text)
        ids = torch.tensor([prompt], device=model.head.device)
        states = model.states_after(ids, HUGINN_LOOPS)
        tops = (_top(head_logits(state[0, -1], model.head)) for state in states)
        written = write(huginn_next(model, loops), prompt, max_tokens, ids.device)
        cases.append(
            {
                "text": text,
                "ids": prompt,
                "top5": dict(zip(map(str, HUGINN_LOOPS), tops, strict=True)),
                f"greedy_r{loops}": written.ids,
                "greedy_text": tokenizer.decode(written.text_ids, skip_special_tokens=False),
            }
        )
    return {"note": HUGINN_NOTE, "cases": cases}


def _top(logits: Tensor) -> list[list[float]]:
    values, ids = logits.topk(TOP)
    return [[int(token), round(float(value), 4)] for token, value in zip(ids, values, strict=True)]
