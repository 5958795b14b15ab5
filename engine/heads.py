"""Head rows: what the first token after a prompt is sampled from, kept so that a request can start right there.

Owns one tensor of rows, each the final state of a prompt's last token and its LM-head input, and nothing about whose
they are. The seam, for whoever keeps rows or starts from them:

- `Join.head_to` = r: the tick that ends the prompt stores its row in r, in stream order. The request goes on as ever.
- `Join.head_from` = r, with `prefix_tokens` = the whole prompt: nothing of the prompt is computed, not even its last
  token; the first output is sampled from row r, by the same sampler from the same bits. No page is written until then.
- Neither goes with `exports`, whose row is its slot's, and whose last token is always computed.
- Row r < slots belongs to the request in slot r (transfers use it). Whoever plans Joins that keep rows for longer makes
  the tensor larger (`Engine.heads`) and owns the rows behind.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HeadRows:
    """`tensor` [rows, 2 x hidden] of the model's dtype: final state | head input. Written and read in tick order."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, 2 * hidden_size, dtype=dtype, device=device)
        self._hidden = hidden_size

    def store(self, row: int, state: Tensor, x: Tensor) -> None:
        """Keep a state [>= hidden], of which the first values count, and a head input [hidden]."""
        self.tensor[row, : self._hidden] = state[: self._hidden]
        self.tensor[row, self._hidden :] = x

    def load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(states, head inputs), each [N, hidden], of rows [N] int64."""
        held = self.tensor[rows]
        return held[:, : self._hidden], held[:, self._hidden :].contiguous()
