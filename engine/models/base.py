"""The seam between a model and whoever drives it.

Owns two protocols. `LoopedModel` is what a driver may call: four stages, the loop among them exactly one pass through
the recurrent core. `Rows` is what a model may ask about the rows of one call: their positions and attention over
their own KV. A model knows nothing of requests, slots, pages or batches of more than the rows it was handed.

Every tensor of one call has N >= 1 rows, in any order and at any mix of depths.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from epicycle.engine.models.spec import ModelSpec


class Rows(Protocol):
    """Metadata and KV of the rows of one traversal; built once by the driver and shared by all layers."""

    @property
    def positions(self) -> Tensor:
        """[N] int64: RoPE phase, the same in every loop of a token."""
        ...

    @property
    def depths(self) -> Tensor:
        """[N] int64: the 0-based loop about to run."""
        ...

    @property
    def noise_seeds(self) -> Tensor:
        """[N] int64: key of the start state (read by models that draw one)."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, kv_heads, head_dim] at (position, plane of depth, layer), then attend.

        q [N, heads, head_dim]; q and k are already rotated; all three may be strided views. Returns causal attention
        [N, heads, head_dim] of each row over its own history in that plane, at scale head_dim ** -0.5.
        """
        ...

    def attend_once(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `attend` for prelude and coda layers: always plane 0, whatever `depths` says."""
        ...


class LoopedModel(Protocol):
    """Four stages over rows. No stage changes its arguments or keeps anything between calls."""

    @property
    def spec(self) -> ModelSpec: ...

    def prelude(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Token ids [N] int64 -> state [N, state_width] before loop 0."""
        ...

    def loop(self, state: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Exactly one loop: -> (state [N, state_width], gate logits [N] float32, or None without a gate)."""
        ...

    def coda(self, state: Tensor, rows: Rows) -> Tensor:
        """State after a row's last loop -> LM-head input [N, hidden_size]; fills the KV of coda layers."""
        ...

    def head(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """LM-head input [M, hidden_size] -> logits [M, vocab_size] float32.

        `count` [1] int32 on the device: rows from there on are wanted by nobody and may hold anything.
        """
        ...
