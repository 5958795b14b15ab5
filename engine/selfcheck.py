"""Start-up proof that, on this machine, a row's bits don't depend on its company.

Owns the comparison: for every linear shape of the model and for attention, rows alone, in growing batches, and
shuffled must agree bit for bit. Where the matrix library orders a sum by the number of rows, the check falls back to
blocks of a fixed height; where even that fails, it raises SelfCheckError naming the shape. It must not know slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epicycle.engine.errors import SelfCheckError
from epicycle.engine.kernels.attention import KV_TILE
from epicycle.engine.kernels.tiled import TiledOps, Tiling, can_pack
from epicycle.engine.models.spec import ModelSpec
from epicycle.engine.pool import KvPool
from epicycle.engine.rows import RowLayout, TickRows

# From fastest to surest.
TILINGS = (
    Tiling(1, is_packed=True),
    Tiling(4, is_packed=True),
    Tiling(4),
    Tiling(8),
    Tiling(16),
    Tiling(4, is_blocked=True),
    Tiling(16, is_blocked=True),
    Tiling(32, is_blocked=True),
)
MOST_PACKED_VALUES = 1 << 27  # a packed weight exists twice: for models of more values the memory matters more
ATTENTION_TOKENS = 2 * KV_TILE + 22  # three KV tiles, the last one partly filled
_CHUNKS = ((0, 1), (5, 3), (16, 16), (60, 50), (63, 1), (64, 1), (100, 40), (127, 2), (149, 1))


def linear_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """(inputs, outputs) of the matrices that a model of this shape multiplies by."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    shapes = {(hidden, qkv), (heads, hidden), (hidden, 2 * inner), (inner, hidden), (hidden, spec.vocab_size)}
    return shapes | ({(spec.state_width, hidden)} if spec.state_width != hidden else set())


def multiplied_values(spec: ModelSpec) -> int:
    """Values in all matrices that rows are multiplied by."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    layer = hidden * (2 * (spec.heads + spec.kv_heads) * head_dim + 3 * inner)
    return spec.layers * layer + hidden * (spec.vocab_size + spec.state_width)


def choose_ops(spec: ModelSpec, dtype: torch.dtype, most_rows: int) -> TiledOps:
    """The fastest `TiledOps` whose products are invariant for 1 .. `most_rows` rows of every shape of the model."""
    shapes = sorted(linear_shapes(spec))
    for tiling in TILINGS:
        if tiling.is_packed and not (can_pack(dtype) and multiplied_values(spec) <= MOST_PACKED_VALUES):
            continue
        probe = TiledOps(tiling)
        failed = next((shape for shape in shapes if not _is_invariant(probe, shape, dtype, most_rows)), None)
        if failed is None:
            _check_rowwise(probe, spec, dtype, most_rows)
            return TiledOps(tiling)
    raise SelfCheckError(
        "not_invariant",
        f"products of {failed} in {dtype} differ in bits between a row alone and a row in company, whatever the tile; "
        "set cpu_threads to 1, or serve with numerics fast",
    )


def row_counts(most_rows: int) -> list[int]:
    """Counts that hit every way a batch can be cut: 1, odd and even ones, and the largest."""
    counts = {1, 2, 3, 5, 7, 8, 12, 13, 16, 24, 31, 32, 48, 64, 96, 128, 192, 256}
    return sorted({count for count in counts if count < most_rows} | {most_rows})


@torch.inference_mode()
def _is_invariant(ops: TiledOps, shape: tuple[int, int], dtype: torch.dtype, most_rows: int) -> bool:
    generator = torch.Generator().manual_seed(sum(shape))
    inputs, outputs = shape
    x = torch.randn(most_rows, inputs, generator=generator).to(dtype)
    # Columns are independent in every library's order; a bounded number keeps the check short for big models.
    weight = (torch.randn(min(outputs, 8192), inputs, generator=generator) * inputs**-0.5).to(dtype)
    return _agrees(lambda rows: ops.linear(rows, weight), x)


def _agrees(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether `function` gives each row of x the same bits shuffled and in batches of every size."""
    whole = function(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))
    if not torch.equal(function(x[order]), whole[order]):
        return False
    return all(torch.equal(function(x[:count]), whole[:count]) for count in row_counts(len(x)))


@torch.inference_mode()
def _check_rowwise(ops: TiledOps, spec: ModelSpec, dtype: torch.dtype, most_rows: int) -> None:
    """Norms, activations and the exit gate; raises SelfCheckError. No setting changes how they are computed."""
    generator = torch.Generator().manual_seed(most_rows)
    hidden, inner = (
        torch.randn(most_rows, width, generator=generator).to(dtype)
        for width in (spec.hidden_size, spec.intermediate_size)
    )
    weight, bias = hidden[:1].clone(), hidden[0, :1].clone()
    checks = {
        "rms_norm": (lambda rows: ops.rms_norm(rows, weight[0], spec.norm_eps), hidden),
        "silu": (lambda rows: ops.silu_mul(rows, rows), inner),
        "gate": (lambda rows: ops.gate_logit(rows, weight, bias), hidden),
    }
    for name, (function, rows) in checks.items():
        if not _agrees(function, rows):
            raise SelfCheckError(
                "not_invariant",
                f"{name} of {list(rows.shape)} in {dtype} differs in bits between a row alone and a row in company; "
                "set cpu_threads to 1, or serve with numerics fast",
            )


@torch.inference_mode()
def check_attention(pool: KvPool, heads: int) -> None:
    """Compare decode rows alone, together and shuffled, and prompt rows in one chunk and in several.

    Uses a scratch pool, best with pages for `ATTENTION_TOKENS` positions. Raises SelfCheckError.
    """
    tokens = min(pool.pages * pool.page_tokens, ATTENTION_TOKENS)
    probe = _Probe(pool, heads, tokens)
    together = probe.decode(torch.arange(tokens))
    shuffled = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    if not torch.equal(probe.decode(shuffled), together[shuffled]):
        raise _differs("decode", "shuffled")
    for row in range(0, tokens, 21):
        if not torch.equal(probe.decode(torch.tensor([row])), together[row : row + 1]):
            raise _differs("decode", "alone")
    whole = probe.prompt(0, tokens)
    for first, count in _CHUNKS:
        count = min(count, tokens - first)
        if count > 0 and not torch.equal(probe.prompt(first, count), whole[first : first + count]):
            raise _differs("prompt", f"in a chunk of {count}")


def _differs(kind: str, how: str) -> SelfCheckError:
    return SelfCheckError(
        "not_invariant",
        f"{kind} attention {how} differs in bits from a full batch on this machine; set cpu_threads to 1, "
        "or serve with numerics fast",
    )


class _Probe:
    """Random q, k, v of one request that owns the pool's first pages; every row reads the history before it."""

    def __init__(self, pool: KvPool, heads: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        width, kv_heads = pool.geometry.head_dim, pool.geometry.kv_heads
        self._pool = pool
        self._table = torch.arange(pool.pages, dtype=torch.int32).unsqueeze(0)
        self._q = torch.randn(tokens, heads, width, generator=generator).to(pool.k.dtype)
        self._k, self._v = (
            torch.randn(tokens, kv_heads, width, generator=generator).to(pool.k.dtype) for _ in range(2)
        )

    def decode(self, positions: Tensor) -> Tensor:
        return self._run(positions, positions + 1, decode_rows=len(positions))

    def prompt(self, first: int, count: int) -> Tensor:
        positions = torch.arange(first, first + count)
        return self._run(positions, torch.full_like(positions, first + count), decode_rows=0)

    def _run(self, positions: Tensor, ends: Tensor, decode_rows: int) -> Tensor:
        zeros = torch.zeros_like(positions)
        layout = RowLayout(
            slots=zeros,
            positions=positions,
            depths=zeros,
            noise_seeds=zeros,
            ends=ends,
            decode_rows=decode_rows,
            prompt_rows=len(positions) - decode_rows,
        )
        rows = TickRows(self._pool, self._table, layout)
        return rows.attend(0, self._q[positions], self._k[positions], self._v[positions])
