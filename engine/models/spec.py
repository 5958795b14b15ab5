"""`ModelSpec`: the static facts of one looped model, resolved from its config files.

Owns no numerics and imports no torch: planners, schedulers and tools size memory from it. It must not know requests,
devices or dtypes; whatever depends on the dtype takes `dtype_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Facts that hold for every request. Counts are of layers, lanes or ids; depth is counted in loops."""

    model_type: str  # "ouro" | "huginn_raven" | "nanbeige"
    hidden_size: int
    state_width: int  # values a row carries between stages: hidden_size, or twice that (Huginn: state, injection)
    layers: int  # KV layers of plane 0: prelude, recurrent and coda blocks
    first_recurrent: int  # index of the first recurrent layer, and so the number of prelude blocks
    recurrent_layers: int
    loops: int  # the model's full depth
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int  # positions that exist; a longer request is refused at admission
    has_gate: bool  # a trained exit gate gives a logit per loop
    has_costly_boundary: bool  # prelude and coda hold blocks of their own
    has_tied_head: bool  # the LM head is the embedding table
    norm_eps: float
    rope_theta: float
    init_std: float  # of random weights and, for Huginn, of the start state before scaling
    embed_scale: float = 1.0
    eos_ids: tuple[int, ...] = ()  # union of every declaration beside the checkpoint, ascending
    bos_id: int | None = None
    pad_id: int | None = None
    exit_threshold: float = 1.0  # what the checkpoint recommends to a request that names none; 1.0 never leaves early
    min_loops: int = 1

    @property
    def coda_layers(self) -> int:
        return self.layers - self.first_recurrent - self.recurrent_layers

    def kv_token_layer_bytes(self, dtype_bytes: int) -> int:
        """K and V of one token in one layer of one plane."""
        return 2 * self.kv_heads * self.head_dim * dtype_bytes
