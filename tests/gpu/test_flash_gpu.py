"""The FlashAttention libraries that are installed, over the paged pool: errors, and bits in other company.

Which ones may run follows from the card as it does at start; what isn't installed is skipped by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from epicycle.engine.attention_choice import MODULES
from epicycle.engine.errors import OptionError
from epicycle.engine.flash_attention import FlashParts, FlashRun

if TYPE_CHECKING:
    from epicycle.engine.kernels.bench.flash import Paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # what the libraries say of their own parts
]
MODELS = ("ouro", "huginn")
LAYER = 1
SPANS = [(0, 300), (130, 129), (700, 1), (5, 64), (1000, 500)]  # first position and rows of chunks
LENGTHS = [1, 64, 1088, 301, 2]  # of decode rows, their own position included
Attend = Callable[[Tensor, FlashRun], Tensor]


def paged_of(model: str, spans: Sequence[tuple[int, int]]) -> Paged:
    from epicycle.engine.kernels.bench.flash import Paged
    from epicycle.engine.kernels.bench.shapes import SHAPES

    torch.manual_seed(len(spans))
    return Paged(SHAPES[model], spans, pages=300)


def parts_of(name: str, paged: Paged) -> FlashParts:
    from epicycle.engine.kernels.bench.flash import flash_parts

    try:
        return flash_parts(name, paged.shape.head_dim)
    except OptionError as refused:
        pytest.skip(str(refused))


def check_errors_and_company(attend: Attend, paged: Paged) -> None:
    """Errs at most twice as much as plain torch in bfloat16 does, and every request has its bits alone too."""
    from epicycle.engine.kernels.bench.checks import within_twice
    from epicycle.engine.kernels.prompt_attention_triton import plain_prompt_attention

    flat, heads = paged.q.flatten(1), paged.shape.heads
    plain, exact = (
        plain_prompt_attention(flat.to(k.dtype), heads, paged.rows, paged.packed, k, v, LAYER)
        for k, v in ((paged.pool.k, paged.pool.v), (paged.pool.k.float(), paged.pool.v.float()))
    )
    together = attend(paged.q, paged.run(range(len(paged.spans)), LAYER))
    report = within_twice(together.flatten(1), plain, exact)
    assert report["ok"], report
    first = 0
    for request, (_, count) in enumerate(paged.spans):
        own = slice(first, first + count)
        alone = attend(paged.q[own], paged.run([request], LAYER))
        assert torch.equal(together[own], alone), paged.spans[request]
        first += count


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_prompts_err_at_most_twice_as_much_as_plain_torch_and_have_their_bits_in_company(name: str, model: str) -> None:
    paged = paged_of(model, SPANS)
    library = parts_of(name, paged).prompt
    assert library is not None
    check_errors_and_company(library.prompt, paged)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_decode_rows_do_too(name: str, model: str) -> None:
    paged = paged_of(model, [(length - 1, 1) for length in LENGTHS])
    library = parts_of(name, paged).decode
    if library is None:
        pytest.skip(f"{name} is for prompts only on this card")
    check_errors_and_company(library.decode, paged)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_replayed_graph_reads_what_its_tables_hold_by_then(name: str) -> None:
    paged = paged_of("ouro", SPANS)
    library = parts_of(name, paged).prompt
    assert library is not None
    run = paged.run(range(len(SPANS)), LAYER)
    library.prompt(paged.q, run)  # whatever is compiled at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library.prompt(paged.q, run)
    run.lengths[1] -= 40  # its rows are 40 positions earlier now
    graph.replay()
    assert torch.equal(out, library.prompt(paged.q, run))
