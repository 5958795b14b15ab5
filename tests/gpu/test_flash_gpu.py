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
    from epicycle.engine.kernels.bench.flash import FlashRows

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


def rows_of(model: str, spans: Sequence[tuple[int, int]]) -> FlashRows:
    from epicycle.engine.kernels.bench.flash import FlashRows
    from epicycle.engine.kernels.bench.shapes import SHAPES

    torch.manual_seed(len(spans))
    return FlashRows(SHAPES[model], spans)


def parts_of(name: str, asked: FlashRows) -> FlashParts:
    from epicycle.engine.kernels.bench.flash import flash_parts

    try:
        return flash_parts(name, asked.shape.head_dim)
    except OptionError as refused:
        pytest.skip(str(refused))


def check_errors_and_company(attend: Attend, asked: FlashRows) -> None:
    """Errs at most twice as much as plain torch in bfloat16 does, and every request has its bits alone too."""
    from epicycle.engine.kernels.bench.checks import within_twice
    from epicycle.engine.kernels.prompt_attention_triton import plain_prompt_attention

    flat, heads = asked.q.flatten(1), asked.shape.heads
    plain, exact = (
        plain_prompt_attention(flat.to(k.dtype), heads, asked.rows, asked.packed, k, v, LAYER)
        for k, v in ((asked.pool.k, asked.pool.v), (asked.pool.k.float(), asked.pool.v.float()))
    )
    together = attend(asked.q, asked.run(range(len(asked.spans)), LAYER))
    report = within_twice(together.flatten(1), plain, exact)
    assert report["ok"], report
    first = 0
    for request, (_, count) in enumerate(asked.spans):
        own = slice(first, first + count)
        alone = attend(asked.q[own], asked.run([request], LAYER))
        assert torch.equal(together[own], alone), asked.spans[request]
        first += count


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_prompts_err_at_most_twice_as_much_as_plain_torch_and_have_their_bits_in_company(name: str, model: str) -> None:
    asked = rows_of(model, SPANS)
    library = parts_of(name, asked).prompt
    assert library is not None
    check_errors_and_company(library.prompt, asked)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", sorted(MODULES))
def test_decode_rows_do_too(name: str, model: str) -> None:
    asked = rows_of(model, [(length - 1, 1) for length in LENGTHS])
    library = parts_of(name, asked).decode
    if library is None:
        pytest.skip(f"{name} is for prompts only on this card")
    check_errors_and_company(library.decode, asked)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_replayed_graph_reads_what_its_tables_hold_by_then(name: str) -> None:
    asked = rows_of("ouro", SPANS)
    library = parts_of(name, asked).prompt
    assert library is not None
    run = asked.run(range(len(SPANS)), LAYER)
    library.prompt(asked.q, run)  # whatever is compiled at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library.prompt(asked.q, run)
    graph.replay()
    before = out.clone()
    run.lengths[1] -= 40  # its rows are 40 positions earlier now
    graph.replay()
    assert not torch.equal(out, before)
    assert torch.equal(out, library.prompt(asked.q, run))
