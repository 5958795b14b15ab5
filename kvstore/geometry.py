"""The shape of one model's KV: what is stored per token, layer and loop, and how many tokens share a page.

Owns byte sizes of single cells. Must not know planes, layouts, pools or requests.
"""

from __future__ import annotations

import msgspec

from epicycle.kvstore.errors import GeometryRefused

MOST_PAGE_TOKENS = 128
"""Half of the last page of every request is waste on average, in every plane and layer, so pages stay short."""


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a looped model that decide where its keys and values lie.

    Layers are numbered over the whole model: those below `first_recurrent` run once before the loops (prelude), the
    next `recurrent_layers` run in every loop, the rest run once after them (coda). Raises GeometryRefused.
    """

    layers: int
    first_recurrent: int
    recurrent_layers: int
    loops: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    page_tokens: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name == "first_recurrent" else 1
            if getattr(self, name) < least:
                raise GeometryRefused(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.first_recurrent + self.recurrent_layers > self.layers:
            raise GeometryRefused(
                f"recurrent layers {self.first_recurrent}..{self.first_recurrent + self.recurrent_layers - 1} "
                f"lie outside the model's {self.layers} layers"
            )
        if self.page_tokens > MOST_PAGE_TOKENS:
            raise GeometryRefused(
                f"page_tokens is {self.page_tokens}; the limit is {MOST_PAGE_TOKENS}: lower page_tokens, "
                "or choose an attention backend that takes shorter pages"
            )

    @property
    def cell_bytes(self) -> int:
        """K and V of one token in one layer at one depth: 2 * kv_heads * head_dim * element_bytes."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def slot_bytes(self) -> int:
        """K and V of one slot, the cell of every token of a page: page_tokens * cell_bytes."""
        return self.page_tokens * self.cell_bytes

    def is_recurrent(self, layer: int) -> bool:
        """True for layers that run in every loop, and so have a cell per plane."""
        return self.first_recurrent <= layer < self.first_recurrent + self.recurrent_layers
