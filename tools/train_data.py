"""Token arrays of a prepared corpus, and the batches drawn from them.

Owns the corpus tensors on the training device. Must not know which model eats the batches. A corpus is a folder
`tokens/` (or an archive holding it) with `stats.json`, `tokenizer.json` and, per source, `train_NAME.npy` and
`val_NAME.npy`; documents end with token 0.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DOCUMENT_END = 0
# Share of rows that begin inside a document, so that a prompt cut out of the middle of a text isn't foreign.
INSIDE_SHARE = 0.4


@contextmanager
def corpus_folder(path: str) -> Iterator[Path]:
    """The folder with the token files of a corpus given as archive or folder; an archive is unpacked for the while."""
    place = Path(path)
    if place.is_file():
        with tempfile.TemporaryDirectory(prefix="epicycle-corpus-") as scratch:
            with tarfile.open(place) as archive:
                archive.extractall(scratch, filter="data")
            yield Path(scratch) / "tokens"
        return
    inner = place / "tokens"
    yield inner if inner.is_dir() else place


def source_mix(folder: Path, override: str) -> dict[str, float]:
    """Share of training rows per source: the corpus own, or the JSON object that replaces it."""
    stats = json.loads((folder / "stats.json").read_text())
    shares: Mapping[str, float] = (
        json.loads(override) if override else {name: row["mix"] for name, row in stats.items()}
    )
    unknown = sorted(set(shares) - set(stats))
    if unknown:
        raise ValueError(f"mix names unknown sources {unknown}; the corpus has {sorted(stats)} (--mix)")
    return {name: float(share) for name, share in shares.items() if share > 0}


def document_starts(tokens: NDArray[np.generic]) -> NDArray[np.int64]:
    """Index of the first token of every document."""
    ends = np.flatnonzero(tokens[:-1] == DOCUMENT_END)
    return np.concatenate([np.zeros(1, dtype=np.int64), ends + 1])


@dataclass(frozen=True, slots=True)
class Corpus:
    """All training tokens in one row; `first[i]`, `count[i]` delimit source i in the list of document starts."""

    names: tuple[str, ...]
    shares: Tensor  # [sources] float32
    tokens: Tensor  # [N] int16
    starts: Tensor  # [documents] int64
    first: Tensor  # [sources] int64
    count: Tensor  # [sources] int64
    held_out: Mapping[str, Tensor]  # per source [M] int64
    generator: torch.Generator

    def draw(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """A training batch (inputs, targets), each [rows, tokens]: sources by share, documents uniformly."""
        start = self._row_starts(rows).clamp_max(len(self.tokens) - tokens - 2)
        window = self.tokens[start[:, None] + torch.arange(tokens + 1, device=start.device)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _row_starts(self, rows: int) -> Tensor:
        source = torch.multinomial(self.shares, rows, replacement=True, generator=self.generator)
        count = self.count[source]
        document = self.first[source] + (self._uniform(rows) * count).long().clamp_max(count - 1)
        start = self.starts[document]
        length = (self.starts[(document + 1).clamp_max(len(self.starts) - 1)] - start).clamp_min(1)
        inside = start + (self._uniform(rows) * length).long()
        return torch.where(self._uniform(rows) < INSIDE_SHARE, inside, start)

    def _uniform(self, rows: int) -> Tensor:
        return torch.rand(rows, device=self.tokens.device, generator=self.generator)

    def held_out_batches(self, name: str, tokens: int, rows: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Held-out windows of one source that begin at document starts, spread evenly; about `limit` tokens."""
        stream = self.held_out[name]
        tokens = min(tokens, len(stream) - 1)
        starts = torch.from_numpy(document_starts(stream.cpu().numpy())).to(stream.device)
        starts = starts[starts <= len(stream) - 1 - tokens]
        wanted = min(len(starts), max(1, limit // tokens))
        picks = torch.linspace(0, len(starts) - 1, wanted, device=stream.device).long()
        windows = stream[starts[picks][:, None] + torch.arange(tokens + 1, device=stream.device)]
        for part in torch.split(windows, rows):
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def load_corpus(
    folder: Path, mix: Mapping[str, float], max_source_tokens: int, seed: int, device: torch.device
) -> Corpus:
    """Read the sources named in `mix` onto the device."""
    parts = [_read(folder / f"train_{name}.npy", max_source_tokens) for name in mix]
    starts = [document_starts(part) for part in parts]
    bases = np.cumsum([0, *(len(part) for part in parts)])
    count = torch.tensor([len(part) for part in starts], device=device)
    absolute = np.concatenate([part + base for part, base in zip(starts, bases, strict=False)])
    held_out = {name: _read(folder / f"val_{name}.npy", 0).astype(np.int64) for name in mix}
    return Corpus(
        names=tuple(mix),
        shares=torch.tensor(list(mix.values()), dtype=torch.float32, device=device),
        tokens=torch.from_numpy(np.concatenate(parts).astype(np.int16)).to(device),
        starts=torch.from_numpy(absolute).to(device),
        first=torch.cumsum(count, 0) - count,
        count=count,
        held_out={name: torch.from_numpy(stream).to(device) for name, stream in held_out.items()},
        generator=torch.Generator(device=device).manual_seed(seed),
    )


def _read(path: Path, limit: int) -> NDArray[np.uint16]:
    tokens: NDArray[np.uint16] = np.load(path)
    return tokens[:limit] if limit else tokens
