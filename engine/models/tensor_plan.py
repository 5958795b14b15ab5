"""Which tensors a checkpoint must and may hold, by their public names.

Owns the shape of that statement; each architecture fills one in from its `ModelSpec`. Torch-free, so that memory can
be planned and a checkpoint checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """`required` tensors become weights. The rest says what else a published file may contain."""

    required: Mapping[str, Shape]
    constants: Mapping[str, Shape] = field(default_factory=dict)  # float32 buffers, stored or recomputed
    tied: Mapping[str, str] = field(default_factory=dict)  # copy -> required original; either may be absent
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)  # recomputed, whatever a conversion stored

    def shape(self, name: str) -> Shape | None:
        """The shape a known tensor must have, or None for an unknown name."""
        original = self.tied.get(name, name)
        return self.required.get(original, self.constants.get(name))

    def ignores(self, name: str) -> bool:
        return name.endswith(self.ignored_suffixes)

    @property
    def parameters(self) -> int:
        """Weights held in memory; a tied copy counts once."""
        return sum(prod(shape) for shape in self.required.values())
