"""The least time a workload can take on a device: bytes that must be read, operations that must be done.

Owns the formulas and the measured rates of devices; `bench` divides by them. The serial floor reads every prompt at the
matmul rate, then decodes at the copy rate, nothing overlapped. It counts weights and KV that must move and the products
of matrices; norms, sampling, launches and the host are free. Torch-free; must not know requests, only their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epicycle.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device does at best in practice: bytes copied and bfloat16 matmul operations per second."""

    bytes_per_s: float
    flop_per_s: float


# By a part of the device's name. Measured on the card: a device copy, and a large square bfloat16 product.
RATES: dict[str, DeviceRates] = {"H200": DeviceRates(bytes_per_s=4.2e12, flop_per_s=755e12)}


def rates_of(device: str, bytes_per_s: float = 0.0, flop_per_s: float = 0.0) -> DeviceRates | None:
    """The rates of a device by name; values given by hand win. None where one is unknown."""
    known = next((rates for part, rates in RATES.items() if part in device), DeviceRates(0.0, 0.0))
    rates = DeviceRates(bytes_per_s or known.bytes_per_s, flop_per_s or known.flop_per_s)
    return rates if rates.bytes_per_s and rates.flop_per_s else None


@dataclass(frozen=True, slots=True)
class SequenceSize:
    """One request as the floors see it; `loops` is the mean over its decoded tokens (its prompt runs full depth)."""

    prompt: int
    output: int
    loops: float


@dataclass(frozen=True, slots=True)
class Floors:
    """The floors of one model whose weights and KV take `dtype_bytes` a value."""

    spec: ModelSpec
    dtype_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's products: QKV, output, gate and up, down."""
        spec = self.spec
        attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
        return attention + 3 * spec.hidden_size * spec.intermediate_size

    @property
    def loop_weights(self) -> int:
        """Weights that one loop reads; a state that carries the injection beside it is first adapted."""
        spec = self.spec
        adapter = spec.state_width * spec.hidden_size if spec.state_width > spec.hidden_size else 0
        return spec.recurrent_layers * self.layer_weights + adapter

    @property
    def boundary_weights(self) -> int:
        """Weights that a decoded token reads once: prelude and coda layers, LM head. Embedding rows are few."""
        spec = self.spec
        return self.once_layers * self.layer_weights + spec.vocab_size * spec.hidden_size

    @property
    def once_layers(self) -> int:
        return self.spec.layers - self.spec.recurrent_layers

    def weight_bytes(self, loops: float) -> float:
        """Weights read for one decode step of any number of rows that all run `loops`."""
        return self.dtype_bytes * (loops * self.loop_weights + self.boundary_weights)

    @property
    def kv_bytes_per_loop(self) -> int:
        """KV that one row reads in one loop for each token of its context."""
        return self.spec.recurrent_layers * self.spec.kv_token_layer_bytes(self.dtype_bytes)

    def kv_bytes(self, context: float, loops: float) -> float:
        """KV that one decoded token reads over `context` tokens, in its loops and in the layers that run once."""
        once = self.once_layers * self.spec.kv_token_layer_bytes(self.dtype_bytes)
        return context * (loops * self.kv_bytes_per_loop + once)

    @property
    def prompt_token_flop(self) -> float:
        """Operations for one prompt token at full depth, attention and LM head apart."""
        once = self.once_layers * self.layer_weights
        return 2.0 * (self.spec.loops * self.loop_weights + once)

    def prompt_flop(self, prompt: int) -> float:
        """Operations for a prompt: its tokens, causal attention in every layer of every loop, one row of the head."""
        spec = self.spec
        layer_runs = spec.loops * spec.recurrent_layers + self.once_layers
        pairs = prompt * (prompt + 1) / 2
        attention = 4.0 * spec.heads * spec.head_dim * pairs * layer_runs
        return prompt * self.prompt_token_flop + attention + 2.0 * spec.vocab_size * spec.hidden_size

    def decode_s(self, rates: DeviceRates, context: float, loops: float) -> float:
        """One decoded token of one row alone."""
        return (self.weight_bytes(loops) + self.kv_bytes(context, loops)) / rates.bytes_per_s

    def serial_s(self, rates: DeviceRates, sequences: Iterable[SequenceSize], streams: int) -> float:
        """Read all prompts, then decode `streams` at a time.

        A request of P prompt tokens and G outputs decodes G - 1 times, over P + 1 .. P + G - 1 tokens of context. The
        weights of a step are read once for all the streams in it.
        """
        flop = weight_bytes = kv_bytes = 0.0
        for one in sequences:
            steps = max(0, one.output - 1)
            flop += self.prompt_flop(one.prompt)
            kv_bytes += self.kv_bytes(steps * (one.prompt + one.output / 2), one.loops)
            weight_bytes += steps * self.weight_bytes(one.loops)
        return flop / rates.flop_per_s + (weight_bytes / streams + kv_bytes) / rates.bytes_per_s
