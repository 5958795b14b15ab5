"""The Huginn-style model for training: differentiable, with the public tensor names.

Owns the layers and the prelude / core / coda calls. Must not know about optimisers, corpora or files. The engine
has its own serving version; the head is tied to the embedding and isn't stored twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epicycle.tools.train_blocks import RmsNorm, head_logits, linear, rotary_tables, token_loss

ROPE_BASE = 50_000.0
NORM_EPS = 1e-6
STATE_CUT = 3.0  # the start state is a normal clipped at this many standard deviations


@dataclass(frozen=True, slots=True)
class HuginnShape:
    """Sizes of a Huginn-style model; keys and values have as many heads as queries."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    heads: int
    prelude_layers: int
    core_layers: int
    coda_layers: int
    mean_loops: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def effective_depth(self) -> int:
        """Layers a token passes through on average."""
        return self.prelude_layers + self.core_layers * self.mean_loops + self.coda_layers

    @property
    def init_std(self) -> float:
        return math.sqrt(2 / (5 * self.hidden_size))

    @property
    def output_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream."""
        return self.init_std / math.sqrt(2 * self.effective_depth)

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.hidden_size)


class Attention(nn.Module):
    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.Wqkv = linear(shape.hidden_size, 3 * shape.hidden_size, shape.init_std)
        self.proj = linear(shape.hidden_size, shape.hidden_size, shape.output_std)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, shape.heads, shape.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        packed: Tensor = self.Wqkv(x)
        query, key, value = packed.view(*packed.shape[:-1], 3, self.heads, -1).unbind(-3)
        bias = self.qk_bias.to(query.dtype)
        query, key = _rotate_pairs(query + bias[0], cos, sin), _rotate_pairs(key + bias[1], cos, sin)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (2i, 2i + 1) of x [B, S, heads, head_dim] in float32; cos, sin are [S, 1, head_dim / 2]."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class GatedMlp(nn.Module):
    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        self.fc = linear(shape.hidden_size, 2 * shape.ffn_size, shape.init_std)
        self.proj = linear(shape.ffn_size, shape.hidden_size, shape.output_std)

    def forward(self, x: Tensor) -> Tensor:
        packed: Tensor = self.fc(x)
        gate, up = packed.chunk(2, dim=-1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Attention and MLP with a norm before each, and one over each sum."""

    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (RmsNorm(shape.hidden_size, NORM_EPS) for _ in range(4))
        self.attn = Attention(shape)
        self.mlp = GatedMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), cos, sin) + x)
        out: Tensor = self.norm_4(self.mlp(self.norm_3(x)) + x)
        return out


class Transformer(nn.Module):
    """What the public checkpoint keeps under `transformer.`."""

    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.prelude = nn.ModuleList(Block(shape) for _ in range(shape.prelude_layers))
        self.adapter = linear(2 * shape.hidden_size, shape.hidden_size, shape.init_std)
        self.core_block = nn.ModuleList(Block(shape) for _ in range(shape.core_layers))
        self.coda = nn.ModuleList(Block(shape) for _ in range(shape.coda_layers))
        self.ln_f = RmsNorm(shape.hidden_size, NORM_EPS)
        nn.init.normal_(self.wte.weight, std=shape.init_std)


class HuginnModel(nn.Module):
    """The trainable model; the LM head is the embedding matrix."""

    def __init__(self, shape: HuginnShape) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape)
        self.activation_dtype = torch.float32
        self.compiled = False
        self.token_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = token_loss

    @property
    def head(self) -> Tensor:
        return self.transformer.wte.weight

    def compile_layers(self) -> None:
        """Compile each block and the loss. Callers clear `compiled` before they use shapes of another size."""
        for blocks in (self.transformer.prelude, self.transformer.core_block, self.transformer.coda):
            for block in blocks:
                block.compile(dynamic=False)
        self.token_loss = torch.compile(token_loss, dynamic=False)
        self.compiled = True

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_tables(x.shape[1], self.shape.head_dim, ROPE_BASE, x.device)
        return cos[:, None], sin[:, None]

    def _through(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        cos, sin = self._angles(x)
        for block in blocks:
            x = (block if self.compiled else block.forward)(x, cos, sin)
        return x

    def inject(self, ids: Tensor) -> Tensor:
        """Prelude: ids [B, S] -> the injection [B, S, H] that every loop reads."""
        embedded: Tensor = self.transformer.wte(ids)
        return self._through(self.transformer.prelude, embedded.to(self.activation_dtype) * self.shape.embed_scale)

    def core(self, state: Tensor, injection: Tensor) -> Tensor:
        """One loop."""
        joined: Tensor = self.transformer.adapter(torch.cat((state, injection), dim=-1))
        return self._through(self.transformer.core_block, joined)

    def coda(self, state: Tensor) -> Tensor:
        """State [B, S, H] -> what the head reads; the final norm is used on both sides of the coda layers."""
        norm = self.transformer.ln_f
        out: Tensor = norm(self._through(self.transformer.coda, norm(state)))
        return out

    def training_state(self, ids: Tensor, blind_loops: int, traced_loops: int) -> Tensor:
        """Head input after blind + traced loops from a random state; gradients flow through the traced ones."""
        injection = self.inject(ids)
        spread = self.shape.init_std * self.shape.embed_scale
        state = torch.randn_like(injection).clamp(-STATE_CUT, STATE_CUT) * spread
        with torch.no_grad():
            for _ in range(blind_loops):
                state = self.core(state, injection)
        for _ in range(traced_loops):
            state = self.core(state, injection)
        return self.coda(state)

    def states_after(self, ids: Tensor, loops: tuple[int, ...]) -> list[Tensor]:
        """Head inputs after each of the given loop counts (rising), from a zero state."""
        injection = self.inject(ids)
        state, outputs = torch.zeros_like(injection), []
        for loop in range(1, loops[-1] + 1):
            state = self.core(state, injection)
            if loop in loops:
                outputs.append(self.coda(state))
        return outputs

    def settle(self, ids: Tensor, divergence: float, max_loops: int) -> tuple[Tensor, Tensor]:
        """(head input, loops) when each token stops once KL(this loop || the one before) < divergence, in nats."""
        injection = self.inject(ids)
        state, previous = torch.zeros_like(injection), None
        loops = torch.full_like(ids, max_loops)
        settled = torch.zeros_like(ids, dtype=torch.bool)
        for loop in range(1, max_loops + 1):
            state = torch.where(settled[..., None], state, self.core(state, injection))
            output = self.coda(state)
            belief = F.log_softmax(head_logits(output, self.head), dim=-1)
            if previous is not None:
                stops = ((belief.exp() * (belief - previous)).sum(-1) < divergence) & ~settled
                loops = torch.where(stops, loop, loops)
                settled = settled | stops
            previous = belief
        return output, loops
