"""The Ouro-style model for training: differentiable, with the public tensor names.

Owns the layers, one loop of the stack, and the exact dense equivalent of token-by-token decoding with early exit.
Must not know about optimisers, corpora or files. The engine has its own serving version.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epicycle.tools.train_blocks import KeysValues, RmsNorm, linear, rotary_tables, token_loss

# Standard deviation of initial weights relative to 1/sqrt(inputs).
INIT_GAIN = 0.7
# The gate starts at a third: sigmoid(-ln 2).
GATE_BIAS = -math.log(2.0)


@dataclass(frozen=True, slots=True)
class OuroShape:
    """Sizes of an Ouro-style model; keys and values have as many heads as queries."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    loops: int
    rope_theta: float
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


@dataclass(frozen=True, slots=True)
class ExitRule:
    """When a token leaves: F >= threshold and loops >= floor, or loops >= cap. threshold >= 1 never leaves early.

    floor and cap are loops per token, [B, S] int64, or one number for all.
    """

    threshold: float
    floor: Tensor | int
    cap: Tensor | int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What adaptive decoding computed: leaving state [B, S, H], loops run [B, S], and (state, still running) before
    each loop."""

    state: Tensor
    depth: Tensor
    before: tuple[tuple[Tensor, Tensor], ...]


class Attention(nn.Module):
    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        width, std = shape.hidden_size, INIT_GAIN * shape.hidden_size**-0.5
        self.heads = shape.heads
        self.q_proj = linear(width, width, std)
        self.k_proj = linear(width, width, std)
        self.v_proj = linear(width, width, std)
        self.o_proj = linear(width, width, std)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, running: Tensor | None, last: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """Causal attention; tokens that aren't `running` [B, S] offer the keys and values of their last loop."""
        query, key, value = (self._split(layer, x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _rotate_halves(query, cos, sin), _rotate_halves(key, cos, sin)
        if running is not None and last is not None:
            fresh = running[:, None, :, None]
            key, value = torch.where(fresh, key, last[0]), torch.where(fresh, value, last[1])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, (key, value)

    def _split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        flat: Tensor = layer(x)
        return flat.view(*flat.shape[:-1], self.heads, -1).transpose(1, 2)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GatedMlp(nn.Module):
    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.ffn_size
        self.gate_proj = linear(width, inner, INIT_GAIN * width**-0.5)
        self.up_proj = linear(width, inner, INIT_GAIN * width**-0.5)
        self.down_proj = linear(inner, width, INIT_GAIN * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each between two norms; the second norm is applied to the branch before it is added."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        branch_gain = (2 * shape.layers) ** -0.5  # keeps the sum of all branches near the size of one embedding
        self.self_attn = Attention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = RmsNorm(width, eps)
        self.input_layernorm_2 = RmsNorm(width, eps, branch_gain)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm_2 = RmsNorm(width, eps, branch_gain)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, running: Tensor | None, last: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        branch, cache = self.self_attn(self.input_layernorm(x), cos, sin, running, last)
        x = x + self.input_layernorm_2(branch)
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x))), cache


class Trunk(nn.Module):
    """What the public checkpoint keeps under `model.`: embedding, looped layers, final norm and exit gate."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.early_exit_gate = nn.Linear(shape.hidden_size, 1)
        nn.init.normal_(self.embed_tokens.weight, std=INIT_GAIN)
        nn.init.zeros_(self.early_exit_gate.weight)
        nn.init.constant_(self.early_exit_gate.bias, GATE_BIAS)


class OuroModel(nn.Module):
    """The trainable model. `activation_dtype` is the dtype of states; `compiled` says the layers were compiled."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size, 0.5 * shape.hidden_size**-0.5)
        self.activation_dtype = torch.float32
        self.compiled = False
        self.token_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = token_loss

    def compile_layers(self) -> None:
        """Compile each layer and the loss. Callers clear `compiled` before they use shapes of another size."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.token_loss = torch.compile(token_loss, dynamic=False)
        self.compiled = True

    def embed(self, ids: Tensor) -> Tensor:
        states: Tensor = self.model.embed_tokens(ids)
        return states.to(self.activation_dtype)

    def gate_logits(self, states: Tensor) -> Tensor:
        """[B, S, H] -> [B, S] float32. A sum of products, because autocast would turn a matmul to bfloat16."""
        gate = self.model.early_exit_gate
        return (states.float() * gate.weight[0].float()).sum(-1) + gate.bias.float()

    def loop(
        self, states: Tensor, running: Tensor | None = None, last: list[KeysValues] | None = None
    ) -> tuple[Tensor, list[KeysValues]]:
        """One pass of the stack: states [B, S, H] -> (states, keys and values per layer).

        With `running` [B, S], tokens that have left keep their state and the keys and values in `last`.
        """
        cos, sin = rotary_tables(states.shape[1], self.shape.head_dim, self.shape.rope_theta, states.device)
        cos, sin = (torch.cat((t, t), dim=-1).to(self.activation_dtype) for t in (cos, sin))
        x, caches = states, []
        for index, layer in enumerate(self.model.layers):
            call = layer if self.compiled else layer.forward
            x, cache = call(x, cos, sin, running, None if last is None else last[index])
            caches.append(cache)
        x = self.model.norm(x)
        return (x if running is None else torch.where(running[..., None], x, states)), caches

    def all_depths(self, ids: Tensor) -> list[Tensor]:
        """Full-depth states after each loop, every token running every loop."""
        states, depths = self.embed(ids), []
        for _ in range(self.shape.loops):
            states, _ = self.loop(states)
            depths.append(states)
        return depths


def decode(model: OuroModel, ids: Tensor, rule: ExitRule) -> Decoded:
    """Exactly what token-by-token decoding gives when later tokens read min(loop, exit) of the earlier ones.

    Dense over ids [B, S]: a token's result depends on earlier tokens only, so the whole text can be looped at once
    with the tokens that have left held still.
    """
    states = model.embed(ids)
    running = torch.ones_like(ids, dtype=torch.bool)
    depth = torch.zeros_like(ids)
    survival = torch.ones(ids.shape, device=ids.device)
    caches: list[KeysValues] | None = None
    before = []
    for loop in range(1, model.shape.loops + 1):
        before.append((states, running))
        states, caches = model.loop(states, None if loop == 1 else running, caches)
        survival = survival * (1 - torch.sigmoid(model.gate_logits(states)))
        leaves = running & _may_leave(rule, loop, model.shape.loops, survival)
        depth = torch.where(leaves, loop, depth)
        running = running & ~leaves
    return Decoded(states, depth, tuple(before))


def _may_leave(rule: ExitRule, loop: int, loops: int, survival: Tensor) -> Tensor:
    if loop == loops:
        return torch.ones_like(survival, dtype=torch.bool)
    at_cap = torch.as_tensor(loop >= rule.cap, device=survival.device).expand(survival.shape)
    if rule.threshold >= 1:
        return at_cap
    return at_cap | ((1 - survival >= rule.threshold) & torch.as_tensor(loop >= rule.floor, device=survival.device))


def exit_log_probabilities(gate_logits: Tensor) -> Tensor:
    """Gate logits [T, ...] -> log p(exit after loop t), [T, ...]; the last loop takes what is left."""
    stay = F.logsigmoid(-gate_logits[:-1]).cumsum(0)
    survived = torch.cat((torch.zeros_like(gate_logits[:1]), stay))
    leave = F.logsigmoid(gate_logits[:-1])
    return torch.cat((survived[:-1] + leave, survived[-1:]))
