"""A corpus of a few thousand tokens in the layout the trainer reads, made from the synthetic generators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from epicycle.tools.corpus_prepare import encode, train_tokenizer
from epicycle.tools.corpus_synth import make_piece

MIX = {"story": 0.4, "chat": 0.6}


def write_toy_corpus(folder: Path, vocab: int) -> Path:
    """Fill folder/tokens and return the folder."""
    tokens = folder / "tokens"
    tokens.mkdir(parents=True)
    documents = {kind: make_piece(kind, 30_000, (), (), seed=7) for kind in MIX}
    tokenizer = train_tokenizer(iter([text for texts in documents.values() for text in texts]), vocab)
    tokenizer.save(str(tokens / "tokenizer.json"))
    for kind, texts in documents.items():
        np.save(tokens / f"val_{kind}.npy", encode(tokenizer, texts[:8]))
        np.save(tokens / f"train_{kind}.npy", encode(tokenizer, texts[8:]))
    (tokens / "stats.json").write_text(json.dumps({kind: {"mix": share} for kind, share in MIX.items()}))
    return folder
