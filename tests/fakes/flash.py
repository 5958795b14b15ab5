"""A FlashAttention library by plain torch: it reads the pool as the real ones do, through view and table alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from epicycle.engine.flash_attention import FlashRun


@dataclass
class PlainFlash:
    """Meets `flash_attention.FlashLibrary`; `calls` are the kinds of rows it was asked for."""

    calls: list[str] = field(default_factory=list)

    def decode(self, q: Tensor, run: FlashRun) -> Tensor:
        self.calls.append("decode")
        return torch.stack([_attend(row.unsqueeze(0), run, b).squeeze(0) for b, row in enumerate(q)])

    def prompt(self, q: Tensor, run: FlashRun) -> Tensor:
        self.calls.append("prompt")
        assert run.starts is not None
        out, starts = torch.full_like(q, float("nan")), run.starts.tolist()
        for b, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                out[start:end] = _attend(q[start:end], run, b)
        return out


def _attend(q: Tensor, run: FlashRun, b: int) -> Tensor:
    """q [n, heads, d]: the last n positions of sequence b; zero for one of length 0."""
    length = int(run.lengths[b])
    if not length:
        return torch.zeros_like(q)
    kv_heads, page_tokens = run.k.shape[2], run.k.shape[1]
    pages = run.table[b, : -(-length // page_tokens)].to(torch.int64)
    assert bool((pages >= 0).all()) and bool((pages < len(run.k)).all()), "a table never leaves its view"
    keys, values = (it[pages].flatten(0, 1)[:length].float() for it in (run.k, run.v))
    query = q.float().unflatten(1, (kv_heads, -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("nkgd,tkd->kgnt", query, keys)
    asked = torch.arange(length - len(q), length)
    hidden = torch.arange(length)[None, :] > asked[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("kgnt,tkd->nkgd", weights, values).flatten(1, 2).to(q.dtype)
