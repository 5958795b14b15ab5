"""Layouts: which plane a loop writes, and which slot of the flat pool a (page, plane, layer) is.

Two independent choices make a layout:

- planes P (`LAYOUTS`): loop d writes plane d mod P. last_exited has P = loops, so nothing is ever overwritten;
  shared has P = 1; budgeted:K has P = K. One set of formulas covers all three.
- addressing (`packed`): a page owns S slots in a row, and slot(page, p, l) = page * S + start(p) + l - first(p).

      packed       S = L + (P - 1) * R   start(p) = L + (p - 1) * R   first(p) = first recurrent layer   (p > 0)
      rectangular  S = L * P             start(p) = p * L             first(p) = 0

  start(0) = first(0) = 0 in both. Packed leaves out the cells that a deeper plane never has: layers that run once.

Owns the address arithmetic, for tests and for the engine (which indexes tensors by `LayoutFacts`). Must not know
tensors, requests or how many pages there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from epicycle.kvstore.errors import LayoutRefused
from epicycle.kvstore.geometry import KvGeometry

MOST_PAGE_BYTES = 128 << 20
"""A page is the smallest thing a request can own; beyond this a handful of short requests would fill a device."""


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Plain numbers that index the pool's tensors. K and V are apart, each [pages * slots_per_page, page_tokens,
    kv_heads, head_dim]; every offset derived from these must be 64-bit (a pool passes 2**31 elements)."""

    name: str
    is_packed: bool
    planes: int
    layers: int
    page_tokens: int
    slots_per_page: int
    starts: tuple[int, ...]
    """start(plane), slots from the beginning of the page."""
    firsts: tuple[int, ...]
    """first(plane), the layer number that lies at start(plane)."""
    page_bytes: int
    bytes_per_token: int
    serial_prompts: bool


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of one geometry; made by `build_layout`. Pure: no method changes anything.

    Depths d and exits e are 0-based loop numbers: a token that left at e has executed loops 0..e.
    """

    name: str
    geometry: KvGeometry
    planes: int
    is_packed: bool

    @property
    def slots_per_page(self) -> int:
        """S, the slots of one page over all planes and layers."""
        g = self.geometry
        return g.layers + (self.planes - 1) * (g.recurrent_layers if self.is_packed else g.layers)

    @property
    def live_slots_per_page(self) -> int:
        """Slots of a page that some loop writes; equals `slots_per_page` when packed."""
        return self.geometry.layers + (self.planes - 1) * self.geometry.recurrent_layers

    @property
    def page_bytes(self) -> int:
        return self.slots_per_page * self.geometry.slot_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.slots_per_page * self.geometry.cell_bytes

    @property
    def serial_prompts(self) -> bool:
        """True when a prompt must finish all loops of position t before it starts t + 1.

        With fewer planes than loops a deep loop overwrites what a shallow one wrote. A later position that runs too
        early would read the overwritten version or the one before, depending on how the prompt was cut into chunks.
        """
        return self.planes < self.geometry.loops

    @property
    def facts(self) -> LayoutFacts:
        return LayoutFacts(
            name=self.name,
            is_packed=self.is_packed,
            planes=self.planes,
            layers=self.geometry.layers,
            page_tokens=self.geometry.page_tokens,
            slots_per_page=self.slots_per_page,
            starts=tuple(self.start(plane) for plane in range(self.planes)),
            firsts=tuple(self.first(plane) for plane in range(self.planes)),
            page_bytes=self.page_bytes,
            bytes_per_token=self.bytes_per_token,
            serial_prompts=self.serial_prompts,
        )

    def plane(self, depth: int) -> int:
        """The plane that loop `depth` writes, and reads for every position of its request."""
        assert 0 <= depth < self.geometry.loops, (depth, self.geometry.loops)
        return depth % self.planes

    def start(self, plane: int) -> int:
        """Slots of a page that lie before this plane."""
        assert 0 <= plane < self.planes, (plane, self.planes)
        if not self.is_packed:
            return plane * self.geometry.layers
        return 0 if plane == 0 else self.geometry.layers + (plane - 1) * self.geometry.recurrent_layers

    def first(self, plane: int) -> int:
        """The first layer that this plane has a slot for."""
        assert 0 <= plane < self.planes, (plane, self.planes)
        return self.geometry.first_recurrent if self.is_packed and plane > 0 else 0

    def has_slot(self, plane: int, layer: int) -> bool:
        """True when the plane has an address for the layer; packed deeper planes have recurrent layers only."""
        if not (0 <= plane < self.planes and 0 <= layer < self.geometry.layers):
            return False
        return plane == 0 or not self.is_packed or self.geometry.is_recurrent(layer)

    def slot(self, page: int, plane: int, layer: int) -> int:
        """The slot of the flat pool: page * S + start(plane) + layer - first(plane)."""
        assert self.has_slot(plane, layer), (plane, layer)
        return page * self.slots_per_page + self.start(plane) + layer - self.first(plane)

    def view_row(self, page: int, plane: int) -> int:
        """A page-table entry for a view of the pool that is shifted by the layer number: slot - layer >= 0.

        An attention kernel that takes a page table but no layer axis gets, for layer l, the pool from slot l on
        (total_slots - l of them) and these entries, the same for every layer.
        """
        return page * self.slots_per_page + self.start(plane) - self.first(plane)

    def address(self, pages: Sequence[int], position: int, depth: int, layer: int) -> tuple[int, int]:
        """(slot, offset in it) of the cell that loop `depth` of `position` writes in `layer`.

        `pages` is the request's page table. Layers that run once are in plane 0, whatever the depth.
        """
        index, offset = divmod(position, self.geometry.page_tokens)
        plane = self.plane(depth) if self.geometry.is_recurrent(layer) else 0
        return self.slot(pages[index], plane, layer), offset

    def read_version(self, depth: int, exited: int) -> int:
        """The loop whose KV a query at `depth` reads from an earlier token that left at `exited`.

        The last loop that wrote plane(depth), or `exited` where none did and the fill copied it there. That is
        min(depth, exited) for last_exited and `exited` for shared.
        """
        plane = self.plane(depth)
        return exited if plane > exited else exited - (exited - plane) % self.planes

    def fill_planes(self, exited: int, max_loops: int) -> range:
        """Planes that a token leaving at loop `exited` must copy its plane(exited) to, in every recurrent layer.

        They are the ones that no loop of this token wrote and that a later token of the request (`max_loops` at
        most) will read. Prompt tokens run all loops and need none.
        """
        assert 0 <= exited < max_loops <= self.geometry.loops, (exited, max_loops, self.geometry.loops)
        return range(exited + 1, max(exited + 1, min(self.planes, max_loops)))


def _every_loop(loops: int, argument: str) -> int:
    return loops


def _one_plane(loops: int, argument: str) -> int:
    return 1


def _budget(loops: int, argument: str) -> int:
    if not argument.isdecimal() or not 1 <= int(argument) <= loops:
        raise LayoutRefused(f"kv_layout budgeted:{argument} needs a plane count from 1 to {loops}, the model's loops")
    return int(argument)


LAYOUTS: dict[str, Callable[[int, str], int]] = {
    "last_exited": _every_loop,
    "shared": _one_plane,
    "budgeted": _budget,
}
"""Layout name -> planes from (loops, text after the colon)."""


def build_layout(kv_layout: str, geometry: KvGeometry, *, packed: bool = True) -> KvLayout:
    """The layout that `last_exited`, `shared` or `budgeted:K` names, or LayoutRefused."""
    name, colon, argument = kv_layout.partition(":")
    if name not in LAYOUTS or (colon and name != "budgeted"):
        raise LayoutRefused(f"kv_layout is {kv_layout!r}; it must be last_exited, shared or budgeted:K")
    planes = LAYOUTS[name](geometry.loops, argument)
    layout = KvLayout(name=kv_layout, geometry=geometry, planes=planes, is_packed=packed)
    if layout.page_bytes > MOST_PAGE_BYTES:
        raise LayoutRefused(
            f"a page of {geometry.page_tokens} tokens takes {layout.page_bytes} bytes in kv_layout {kv_layout}; "
            f"the limit is {MOST_PAGE_BYTES}: lower page_tokens"
        )
    return layout
