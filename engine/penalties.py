"""Edits of the logits before temperature: penalties for what was said, a request's bias, stop ids held back.

Owns their formulas. Each edit is an exact identity for a row that doesn't use it (x / 1, x - 0, + 0 on a spare column),
so running it for a neighbour's sake changes no bits. Columns from V on are spare: they hold -inf, and ids that pad a
list point there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epicycle.engine.sampling import SampleRows


def penalise(logits: Tensor, rows: SampleRows) -> Tensor:
    """logits [M, V] float32 -> same shape.

    Repetition looks at prompt and output (a positive logit is divided by it, another multiplied); presence and
    frequency look at the output only and are subtracted, once and per occurrence.
    """
    assert rows.output_counts is not None
    assert rows.prompt_seen is not None
    repetition = rows.repetition_penalty.unsqueeze(1)
    was_said = rows.output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(rows.prompt_seen | was_said, repeated, logits)
    logits = logits - rows.frequency_penalty.unsqueeze(1) * rows.output_counts
    return logits - rows.presence_penalty.unsqueeze(1) * was_said


def add_bias(padded: Tensor, rows: SampleRows) -> Tensor:
    """padded [M, W] with W > V -> same shape, with the rows' biases added."""
    return padded.scatter_add(1, rows.bias_ids, rows.bias_values)


def hold_stops(padded: Tensor, rows: SampleRows, vocab_size: int) -> Tensor:
    """padded [M, W] -> same shape, where rows that have fewer than `min_tokens` can't get a token that ends them."""
    is_held = (rows.generated < rows.min_tokens).unsqueeze(1)
    ids = rows.stop_ids.masked_fill(~is_held, vocab_size)
    return padded.scatter(1, ids, -math.inf)
