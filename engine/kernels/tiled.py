"""`TiledOps`: the CPU operations whose bits don't depend on a row's company.

Owns the shapes that operators see. Libraries choose another order of summation for one row than for many, and compute
the tail of a vector with other instructions than its body. So rows are padded to a multiple of a tile, vectors to a
multiple of 32 lanes, and strided inputs are made contiguous; how matrices are multiplied is a `Tiling`. `selfcheck.py`
finds the one that is needed on this machine; this file trusts it. It knows no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epicycle.engine.kernels.plain import PlainOps

LANES = 32  # covers two unrolled vectors of any CPU that torch has code for
_PACKED_FOR_ROWS = 16  # the layout is chosen for so many rows, and serves any number


@dataclass(frozen=True, slots=True)
class Tiling:
    """How matrices are multiplied. Rows are padded to a multiple of `row_tile`.

    `is_packed` lays a weight out for the vector unit once, at its first use: its products then have one order from one
    row up, and needn't rearrange the weight each time. `is_blocked` multiplies in blocks of exactly `row_tile` rows,
    the slowest and surest way.
    """

    row_tile: int
    is_packed: bool = False
    is_blocked: bool = False


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has packed products of that dtype."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class TiledOps:
    """Meets `ops.Ops` in an invariant way. It holds packed copies of the weights it has met; callers that hand in a
    multiple of `tiling.row_tile` rows pay nothing for padding."""

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling
        self._plain = PlainOps()
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}  # id of a weight -> itself (kept alive), packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, tile = x.shape[0], self.tiling.row_tile
        x = self._fill(x)
        if self.tiling.is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._pack(weight), bias, "none", [], "")
        elif not self.tiling.is_blocked or x.shape[0] == tile:
            out = F.linear(x, weight, bias)
        else:
            out = torch.cat([F.linear(block, weight, bias) for block in torch.split(x, tile)])
        return out if out.shape[0] == rows else out[:rows]

    def _pack(self, weight: Tensor) -> Tensor:
        found = self._packed.get(id(weight))
        if found is None:
            found = (weight, torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS))
            self._packed[id(weight)] = found
        return found[1]

    def gate_logit(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # A one-column product is another routine in every library; a row sum is one order whatever the rows.
        rows = x.shape[0]
        wide = self._fill(x).float() * weight.float()
        return (wide.sum(-1)[:rows] + bias.float()).to(x.dtype).float()

    def logits(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        return self.linear(x, weight).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Fewer calls than the library's norm; each row is reduced by itself there and here.
        wide = x.float()
        scale = (wide * wide).sum(-1, keepdim=True).mul_(1.0 / x.shape[1]).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        width = gate.shape[1]
        if width % LANES == 0:
            return F.silu(gate).mul_(up)
        return F.silu(F.pad(gate, (0, -width % LANES)))[:, :width] * up

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._plain.rope_half(x, cos, sin)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._plain.rope_pairs(x, cos, sin)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self._plain.embed(table, tokens, scale)

    def start_noise(self, table: Tensor, seeds: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return self._plain.start_noise(table, seeds, positions, width, dtype)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self._lanes(x))[: x.shape[0]]

    def _fill(self, x: Tensor) -> Tensor:
        """x [N, K] contiguous, N a multiple of the tile; the rows added are zero."""
        short = -x.shape[0] % self.tiling.row_tile
        return F.pad(x, (0, 0, 0, short)) if short else x.contiguous()

    def _lanes(self, x: Tensor) -> Tensor:
        """x [N] padded with zeros to whole vectors."""
        short = -x.shape[0] % LANES
        return F.pad(x, (0, short)) if short else x
