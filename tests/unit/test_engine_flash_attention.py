"""How the paged pool looks to a FlashAttention library, and how each library is called."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from epicycle.engine import flash_attention
from epicycle.engine.attention_choice import AttentionChoice
from epicycle.engine.flash_attention import FlashParts, FlashRun, layer_view, load_flash, slot_tables
from epicycle.engine.pool import KvPool
from epicycle.kvstore.geometry import KvGeometry
from epicycle.kvstore.layouts import build_layout

CPU = torch.device("cpu")
PAGES, TOKENS = 5, 4


def pool_of(layout: str, *, packed: bool, first_recurrent: int) -> KvPool:
    geometry = KvGeometry(
        layers=5, first_recurrent=first_recurrent, recurrent_layers=3, loops=4, kv_heads=2, head_dim=8,
        element_bytes=4, page_tokens=TOKENS,
    )  # fmt: skip
    return KvPool(build_layout(layout, geometry, packed=packed), PAGES, torch.float32, CPU)


@pytest.mark.parametrize(("packed", "first_recurrent"), [(True, 1), (False, 1), (True, 0)])
@pytest.mark.parametrize("layout", ["last_exited", "shared", "budgeted:2"])
def test_a_table_finds_every_cell_of_every_plane_and_layer(layout: str, packed: bool, first_recurrent: int) -> None:
    pool = pool_of(layout, packed=packed, first_recurrent=first_recurrent)
    pool.k.copy_(torch.arange(pool.k.numel()).view_as(pool.k))
    page_table = torch.tensor([[3, 0, pool.zero_page], [4, 2, 1]])
    recurrent = range(first_recurrent, first_recurrent + 3)
    for plane in range(pool.facts.planes):
        shift = pool.plane_starts[plane].expand(2)
        table = slot_tables(torch.tensor([0, 1]), shift, page_table, pool.facts.slots_per_page)
        assert bool((table >= 0).all())
        for layer in range(5) if plane == 0 else recurrent:
            view = layer_view(pool.k, layer)
            assert len(pool.k) - layer == len(view)
            for row, pages in enumerate(page_table.tolist()):
                for column, page in enumerate(pages):
                    offsets = torch.arange(TOKENS)
                    cells = pool.cells(torch.full((TOKENS,), page), torch.full((TOKENS,), plane), offsets)
                    expected = pool.k_cells[cells + pool.layer_cells(layer)]
                    assert torch.equal(expected, view[int(table[row, column])])


def test_nobodys_row_has_a_table_inside_the_pool() -> None:
    pool = pool_of("last_exited", packed=True, first_recurrent=1)
    table = slot_tables(torch.tensor([-1]), torch.tensor([3]), torch.tensor([[2, 1]]), pool.facts.slots_per_page)
    assert bool((table >= 0).all()) and bool((table < len(pool.k)).all())


class Recorder(ModuleType):
    """A library whose functions answer with their query and keep how they were called."""

    def __init__(self) -> None:
        super().__init__("library")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def flash_attn_with_kvcache(self, q: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls.append(("kvcache", rest, named))
        return q

    def flash_attn_varlen_func(self, q: Tensor, *rest: Any, **named: Any) -> Any:
        self.calls.append(("varlen", rest, named))
        return (q, None) if "seqused_k" in named else q


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_libraries_are_called_with_one_split_a_table_and_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder()
    monkeypatch.setattr(flash_attention, "import_module", lambda _: library)
    parts = load_flash(AttentionChoice(name, name, ""))
    assert parts.decode is not None and parts.decode is parts.prompt
    q, pool = torch.randn(3, 2, 8), torch.zeros(9, TOKENS, 2, 8)
    lengths, table = torch.tensor([5, 0, 7], dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    assert torch.equal(q, parts.decode.decode(q, FlashRun(pool, pool, lengths, table)))
    starts = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    assert torch.equal(q, parts.decode.prompt(q, FlashRun(pool, pool, lengths, table, starts)))
    for _, _, named in library.calls:
        assert named["causal"] is True
        assert table is named.get("page_table", named.get("block_table"))
    assert 1 == library.calls[0][2]["num_splits"]


def test_other_kernels_need_no_library() -> None:
    assert FlashParts() == load_flash(AttentionChoice("triton", "triton", ""))


def test_only_what_the_choice_names_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    def import_module(name: str) -> ModuleType:
        imported.append(name)
        return Recorder()

    monkeypatch.setattr(flash_attention, "import_module", import_module)
    parts = load_flash(AttentionChoice("triton", "fa4", ""))
    assert (None, ["flash_attn.cute"]) == (parts.decode, imported)
