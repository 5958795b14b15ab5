"""The count of planes behind the figure of collapsed pages."""

from __future__ import annotations

import pytest

from epicycle.tools.page_collapse import LAYERS, drawn_depths, figure, slots_of

PAGE = 4 * LAYERS  # slots of a page with all planes


@pytest.mark.parametrize(
    ("depths", "collapsed"),
    [
        ([4, *[2] * 8], 2 * PAGE // 2),  # two full pages of two planes
        ([4, 2, 2, 2, 3, *[2] * 4], 3 * PAGE // 4 + PAGE // 2),  # one token keeps a plane for its page
        ([4, *[2] * 9], 2 * PAGE // 2 + PAGE),  # a page that isn't full keeps all
    ],
)
def test_a_page_needs_the_planes_of_its_deepest_token(depths: list[int], collapsed: int) -> None:
    whole, with_collapse, compact = slots_of(depths, prompt=4, page_tokens=4)
    prompt = PAGE
    assert (1 + -(-(len(depths) - 1) // 4)) * PAGE == whole
    assert prompt + collapsed == with_collapse
    assert prompt + LAYERS * sum(depths[1:]) / 4 == compact


def test_short_pages_collapse_more_and_none_beats_storage_token_by_token() -> None:
    depths = drawn_depths(16, 65)
    small, large = (figure("drawn", depths, 32, page_tokens) for page_tokens in (4, 16))
    assert 0 < large.more < small.more < small.compact == large.compact
