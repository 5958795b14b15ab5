"""How prompts and decode rows of one tick share the multiprocessors out."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.kernels.share_triton import plain_share, share_out

MULTIPROCESSORS = 132


@pytest.mark.parametrize(
    ("sizes", "spans", "of_prompts"),
    [
        ([2080] * 20, [(32, 2016)], 50),  # as long for either: 16 items see 1,072 positions each, 20 rows 2,080
        ([1090] * 107, [(0, 1024), (0, 896)], 15),
        ([1090] * 300, [(5, 128)], 1),  # never none
        ([40, 0, -1], [(0, 2048)], 131),
        ([1200] * 7, [(60000, 128)], 16),  # no more than there are jobs
        ([1], [(60000, 2048)], 131),  # nor all
        ([0, 0], [(0, 0), (7, 300), (0, 0)], 48),  # three items of 16 heads
    ],
)
def test_shares_are_by_what_rows_read_and_see(sizes: list[int], spans: list[tuple[int, int]], of_prompts: int) -> None:
    assert (of_prompts, MULTIPROCESSORS - of_prompts) == plain_share(sizes, spans, 128, 16, 16, MULTIPROCESSORS)
    starts, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*spans, strict=True))
    share = share_out(torch.tensor(sizes, dtype=torch.int32), starts, counts, 128, 16, 16, MULTIPROCESSORS)
    assert [of_prompts, MULTIPROCESSORS - of_prompts] == share.tolist()
