"""The checks that are made at the start on a GPU, with every card's kernels in the place of Hopper's.

They hold where bits agree, and find where one doesn't. Whatever raises in them only turns a kernel off, so it must be
seen here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epicycle.engine.kernels import prompt_check, share_check
from epicycle.engine.kernels.decode_attention_triton import decode_attention
from epicycle.engine.kernels.prompt_attention_triton import prompt_attention

SHAPE = (2, 2, 16, 16, torch.float16, torch.device("cpu"))
SPANS = ((0, 20), (14, 3), (40, 1))
Attend = Callable[..., Tensor]


def prompts(wrong_from: int, calls: list[Tensor | None]) -> Attend:
    """Prompt attention whose results are a bit off from the call of that number on; `calls` are the shares it got."""

    def attend(*arguments: object, out: Tensor, share: Tensor | None = None) -> Tensor:
        calls.append(share)
        prompt_attention(*arguments, out=out)  # type: ignore[arg-type]
        if len(calls) > wrong_from:
            out.view(-1)[5] += 0.5
        return out

    return attend


@pytest.mark.parametrize(("wrong_from", "holds"), [(100, True), (3, False)])
def test_prompts_for_hopper_are_compared_every_time(
    wrong_from: int, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor | None] = []
    monkeypatch.setattr(prompt_check, "hopper_prompt_attention", prompts(wrong_from, calls))
    assert holds == prompt_check._is_equal(SPANS, 2, *SHAPE)
    assert 4 == len(calls)  # items of either size, twice


@pytest.mark.parametrize("item_rows", [rows for rows, _ in share_check.CASES])
@pytest.mark.parametrize(("wrong_from", "holds"), [(100, True), (3, False)])
def test_sharing_is_compared_with_one_after_the_other(
    wrong_from: int, holds: bool, item_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor | None] = []
    besides: list[bool] = []

    def decode(*arguments: object, beside: bool, **options: object) -> Tensor:
        besides.append(beside)
        return decode_attention(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(share_check, "hopper_prompt_attention", prompts(wrong_from, calls))
    monkeypatch.setattr(share_check, "decode_attention", decode)
    monkeypatch.setattr(share_check, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(share_check, "CHUNKS", SPANS)
    monkeypatch.setattr(share_check, "TIMES", 2)
    assert holds == share_check._is_equal(share_check.Both(*SHAPE, item_rows, (1, 17, 130, 300)))
    assert [None] == calls[:1] and [8, 4] == calls[2].tolist()  # type: ignore[union-attr]
    assert [share is not None for share in calls] == besides
