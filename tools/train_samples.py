"""Texts written by a trained model: a plain cacheless generator, and the samples kept in report.json.

Owns the sample prompts and the ChatML form of a conversation. Slow on purpose and small: every step runs the whole
text again, so nothing of the engine is needed to trust it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from epicycle.tools.train_blocks import head_logits
from epicycle.tools.train_files import END_OF_TEXT, END_OF_TURN
from epicycle.tools.train_huginn import HuginnModel
from epicycle.tools.train_ouro import ExitRule, OuroModel, decode
from epicycle.tools.train_run import Run

OPENINGS = ("Once upon a time, there was a little girl named", "The sea was calm and")
CHATS = (
    ("Hello!",),
    ("What is the capital of France?",),
    ("What is 34 + 52?",),
    ("Tell me a story about a fox named Pip.",),
    ("I feel sad today.", "I am sorry to hear that. Would you like to talk about it?", "Please cheer me up."),
)
TOP_K = 40
MAX_SAMPLE_CONTEXT = 384

# ids [1, S] -> (logits of the last position [V] float32, loops it ran or None)
NextLogits = Callable[[Tensor], tuple[Tensor, int | None]]


def chat_prompt(turns: Sequence[str]) -> str:
    """User and assistant turns in ChatML, the user first, ending where the assistant is to speak."""
    roles = ("user", "assistant")
    said = (f"<|im_start|>{roles[index % 2]}\n{text}<|im_end|>\n" for index, text in enumerate(turns))
    return "".join(said) + "<|im_start|>assistant\n"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@dataclass(frozen=True, slots=True)
class Written:
    """A continuation: ids with the stop token if one came, loops per id, smallest gap between the best two logits."""

    ids: list[int]
    depths: list[int]
    smallest_margin: float

    @property
    def text_ids(self) -> list[int]:
        """The ids without the stop token."""
        return [token for token in self.ids if token not in (END_OF_TEXT, END_OF_TURN)]


@torch.no_grad()
def write(
    next_logits: NextLogits,
    prompt: Sequence[int],
    max_tokens: int,
    device: torch.device,
    pick: Callable[[Tensor], int] = lambda logits: int(logits.argmax()),
) -> Written:
    """Continue a prompt until a stop token or `max_tokens`."""
    ids, depths, margin = list(prompt), [], float("inf")
    for _ in range(max_tokens):
        logits, depth = next_logits(torch.tensor([ids], device=device))
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        ids.append(pick(logits))
        if depth is not None:
            depths.append(depth)
        if ids[-1] in (END_OF_TEXT, END_OF_TURN):
            break
    return Written(ids[len(prompt) :], depths, margin)


def ouro_next(model: OuroModel, rule: Callable[[Tensor], ExitRule]) -> NextLogits:
    """Next-token logits under an exit rule; `rule` is asked with the ids so far."""

    def next_logits(ids: Tensor) -> tuple[Tensor, int | None]:
        decoded = decode(model, ids, rule(ids))
        return head_logits(decoded.state[0, -1], model.lm_head.weight), int(decoded.depth[0, -1])

    return next_logits


def huginn_next(model: HuginnModel, loops: int) -> NextLogits:
    """Next-token logits after a fixed number of loops from a zero state."""

    def next_logits(ids: Tensor) -> tuple[Tensor, int | None]:
        (state,) = model.states_after(ids, (loops,))
        return head_logits(state[0, -1], model.head), None

    return next_logits


def sampler(temperature: float, seed: int) -> Callable[[Tensor], int]:
    """Pick among the best tokens at a temperature, from a generator of its own."""
    dice = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> int:
        values, ids = logits.cpu().topk(min(TOP_K, logits.numel()))
        odds = F.softmax(values / temperature, dim=-1)
        return int(ids[torch.multinomial(odds, 1, generator=dice)])

    return pick


def ouro_samples(run: Run, model: OuroModel) -> dict[str, Any]:
    """Greedy texts with early exit, and sampled ones at full depth."""
    loops = model.shape.loops
    early = ouro_next(model, lambda _: ExitRule(0.7, 1, loops))
    full = ouro_next(model, lambda _: ExitRule(1.0, 1, loops))
    return {
        "samples_q0.7_greedy": _samples(run, early, None),
        "samples_full_t0.7": _samples(run, full, sampler(0.7, run.recipe.seed)),
    }


def huginn_samples(run: Run, model: HuginnModel) -> dict[str, Any]:
    """Greedy texts at the mean loop count."""
    return {"samples": _samples(run, huginn_next(model, model.shape.mean_loops), None)}


def _samples(run: Run, next_logits: NextLogits, pick: Callable[[Tensor], int] | None) -> list[dict[str, Any]]:
    prompts = [(text, text) for text in OPENINGS] + [(turns[-1], chat_prompt(turns)) for turns in CHATS]
    report = []
    for shown, text in prompts:
        prompt = encode(run.tokenizer, text)
        room = min(run.recipe.sample_tokens, min(run.recipe.context_tokens, MAX_SAMPLE_CONTEXT) - len(prompt))
        with run.precision():
            written = write(next_logits, prompt, room, run.device, *([pick] if pick else []))
        answer = run.tokenizer.decode(written.text_ids, skip_special_tokens=False)
        mean = round(sum(written.depths) / len(written.depths), 3) if written.depths else None
        run.journal.say(f"sample, mean depth {mean}: {shown!r} -> {answer!r}")
        report.append({"prompt": shown, "text": answer, "mean_depth": mean})
    return report
