"""One training run's surroundings: recipe, corpus, device, precision, log and output folder.

Owns opening and closing them. Must not know the stages or the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from epicycle.tools import train_files
from epicycle.tools.train_data import Corpus, corpus_folder, load_corpus, source_mix
from epicycle.tools.train_journal import Journal
from epicycle.tools.train_recipe import Recipe


@dataclass(frozen=True, slots=True)
class Run:
    """What every stage needs: the recipe, its inputs on the device, and where to write."""

    recipe: Recipe
    corpus: Corpus
    tokenizer: Tokenizer
    device: torch.device
    journal: Journal
    out: Path

    def end_s(self, share: float) -> float:
        """The moment of the journal's clock at which a share of the budget is used."""
        return self.recipe.seconds * share

    def precision(self) -> torch.autocast:
        """Mixed precision on a GPU, plain float32 on the CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def compiles(self) -> bool:
        return self.recipe.compile_layers and self.device.type == "cuda"


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """Seed torch, read the corpus, open the log. The run is usable inside the context only."""
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    device = _device(recipe.device)
    with Journal(out / "log.txt") as journal, corpus_folder(recipe.corpus) as folder:
        corpus = load_corpus(folder, source_mix(folder, recipe.mix), recipe.max_source_tokens, recipe.seed, device)
        train_files.copy_tokenizer(folder, out, recipe.context_tokens)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        journal.say(f"torch {torch.__version__} on {device}; {len(corpus.tokens):,} tokens from {list(corpus.names)}")
        yield Run(recipe, corpus, tokenizer, device, journal, out)
        journal.say("all done")


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
