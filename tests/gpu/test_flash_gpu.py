"""The FlashAttention libraries that are installed, over the paged pool: errors, and bits in other company.

Which ones may run follows from the card as it does at start; what isn't installed is skipped by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from epicycle.engine.attention_choice import MODULES, AttentionChoice, AttentionFacts, choose_attention
from epicycle.engine.attention_choice import installed_libraries as installed
from epicycle.engine.errors import OptionError
from epicycle.engine.flash_attention import FlashParts, FlashRun, layer_view, load_flash, slot_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # what the libraries say of their own parts
]
MODELS = ("ouro", "huginn")
PAGES, SLOTS_PER_PAGE, LAYER = 300, 3, 1
SPANS = [(0, 300), (130, 129), (700, 1), (5, 64), (1000, 500)]  # first position and rows of chunks
LENGTHS = [1, 64, 1088, 301, 2]  # of decode rows, their own position included


def parts_of(name: str, head_dim: int) -> FlashParts:
    if name not in installed():
        pytest.skip(f"{name} isn't installed: there is no module {MODULES[name]}")
    return load_flash(choice_of(name, head_dim))


def choice_of(name: str, head_dim: int) -> AttentionChoice:
    from epicycle.engine.kernels.bench.rows import PAGE_TOKENS

    facts = AttentionFacts(
        capability=torch.cuda.get_device_capability(), dtype="bfloat16", head_dim=head_dim, page_tokens=PAGE_TOKENS,
        page_bytes=0, poison=False, installed=installed(),
    )  # fmt: skip
    try:
        return choose_attention(name, facts)
    except OptionError as error:
        pytest.skip(str(error))


class Paged:
    """A pool and the tables of one request each for `spans`."""

    def __init__(self, model: str, spans: Sequence[tuple[int, int]]) -> None:
        from epicycle.engine.kernels.bench.rows import make_pool, prompt_batch
        from epicycle.engine.kernels.bench.shapes import SHAPES

        torch.manual_seed(len(spans))
        self.shape, self.spans = SHAPES[model], spans
        self.pool = make_pool(self.shape, PAGES, SLOTS_PER_PAGE)
        self.rows, self.packed = prompt_batch(self.pool, spans, 128)
        self.q = torch.randn(
            len(self.rows.slots), self.shape.heads, self.shape.head_dim, dtype=torch.bfloat16, device="cuda"
        )
        self.firsts = [sum(count for _, count in spans[:at]) for at in range(len(spans))]

    def run(self, requests: Sequence[int]) -> FlashRun:
        """Of some requests, as the engine hands it over."""
        counts = [self.spans[at][1] for at in requests]
        slots = torch.tensor(requests, device="cuda")
        planes = torch.zeros(len(requests), dtype=torch.int32, device="cuda")
        return FlashRun(
            layer_view(self.pool.k, LAYER),
            layer_view(self.pool.v, LAYER),
            column([sum(self.spans[at]) for at in requests]),
            slot_tables(slots, planes, self.rows.page_table, SLOTS_PER_PAGE),
            column([sum(counts[:at]) for at in range(len(counts) + 1)]),
        )

    def own(self, of_rows: Tensor, request: int) -> Tensor:
        first = self.firsts[request]
        return of_rows[first : first + self.spans[request][1]]

    def twins(self) -> tuple[Tensor, Tensor]:
        """By plain torch in bfloat16 and in float32."""
        from epicycle.engine.kernels.prompt_attention_triton import plain_prompt_attention

        pools = (self.pool.k, self.pool.v), (self.pool.k.float(), self.pool.v.float())
        flat = self.q.flatten(1)
        plain, exact = (
            plain_prompt_attention(flat.to(k.dtype), self.shape.heads, self.rows, self.packed, k, v, LAYER)
            for k, v in pools
        )
        return plain, exact


def column(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_prompts_err_at_most_twice_as_much_as_plain_torch_and_have_their_bits_in_company(name: str, model: str) -> None:
    from epicycle.engine.kernels.bench.checks import within_twice

    paged = Paged(model, SPANS)
    library = parts_of(name, paged.shape.head_dim).prompt
    assert library is not None
    everyone = list(range(len(SPANS)))
    together = library.prompt(paged.q, paged.run(everyone))
    report = within_twice(together.flatten(1), *paged.twins())
    assert report["ok"], report
    for request in everyone:
        alone = library.prompt(paged.own(paged.q, request), paged.run([request]))
        assert torch.equal(paged.own(together, request), alone), SPANS[request]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_decode_rows_do_too(name: str, model: str) -> None:
    from epicycle.engine.kernels.bench.checks import within_twice

    paged = Paged(model, [(length - 1, 1) for length in LENGTHS])
    library = parts_of(name, paged.shape.head_dim).decode
    if library is None:
        pytest.skip(f"{name} is for prompts only on this card")
    everyone = list(range(len(LENGTHS)))
    together = library.decode(paged.q, paged.run(everyone))
    report = within_twice(together.flatten(1), *paged.twins())
    assert report["ok"], report
    for request in everyone:
        alone = library.decode(paged.own(paged.q, request), paged.run([request]))
        assert torch.equal(paged.own(together, request), alone), LENGTHS[request]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_replayed_graph_reads_what_its_tables_hold_by_then(name: str) -> None:
    paged = Paged("ouro", SPANS)
    library = parts_of(name, paged.shape.head_dim).prompt
    assert library is not None
    run = paged.run(range(len(SPANS)))
    library.prompt(paged.q, run)  # whatever is compiled at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library.prompt(paged.q, run)
    run.lengths[1] -= 40  # its rows are 40 positions earlier now
    graph.replay()
    assert torch.equal(out, library.prompt(paged.q, run))
