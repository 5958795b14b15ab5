"""The tokens and exit depths recorded for the embedded Ouro, over HTTP: text goes in, the recorded ids come out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from epicycle.engine.models.locate import locate
from tests.e2e.live.calls import Calls

CASES = json.loads((locate("embedded:ouro", "checkpoint").folder / "golden_serving.json").read_text())["cases"]
TOKENS = 14
TOKEN_MARGIN = 1e-3  # below it another correct order of float32 sums may pick the other token


def asked(text: str, run: dict[str, Any]) -> dict[str, Any]:
    bounds = {name: run[name] for name in ("exit_threshold", "min_loops", "max_loops")}
    return {"prompt": text, "max_tokens": min(TOKENS, len(run["ids"])), "temperature": 0, **bounds}


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case["text"][:20].strip())
async def test_a_recorded_run_is_repeated(calls: Calls, case: dict[str, Any]) -> None:
    runs = [run for run in case["runs"] if run["smallest_top2_margin"] > TOKEN_MARGIN]
    answers = await asyncio.gather(*(calls.complete(**asked(case["text"], run)) for run in runs))

    assert runs
    for run, answer in zip(runs, answers, strict=True):
        assert case["prompt_ids"] == answer.choice.prompt_token_ids
        assert run["ids"][:TOKENS] == answer.choice.token_ids
        assert run["exit_depths"][:TOKENS] == answer.choice.exit_depths
        assert run["text"].startswith(answer.choice.text)
