"""lm_eval's `local-completions` against the live server, offline: its scores are those of direct calls."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live.calls import Calls
from tests.e2e.live.server import LiveServer

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.clients
TASKS = Path(__file__).with_name("lm_eval_tasks")
TIMEOUT_S = 240.0


def evaluate(live: LiveServer, out: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """(results by task, logged samples by task) of one run of the command in a process of its own."""
    base_url = f"{live.base_url}/v1/completions"
    words = ["--model", "local-completions", "--tasks", "epicycle_sums,epicycle_endings", "--include_path", str(TASKS)]
    words += ["--model_args", f"model=ouro-tiny,base_url={base_url},tokenizer_backend=remote,max_length=1024"]
    words += ["--output_path", str(out), "--log_samples", "--batch_size", "2"]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(out / "hf"),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words],
        cwd=TASKS,  # the tasks name their data files relative to it
        env=os.environ | offline | {"HF_HOME": str(out / "hf")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert 0 == ended.returncode, ended.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    samples = {
        path.name.removeprefix("samples_").rsplit("_", 1)[0]: [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in out.rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


async def generated(calls: Calls, prompt: str) -> str:
    answer = await calls.complete(prompt=prompt, max_tokens=16, temperature=0, seed=1234, stop=["\n", "<|im_end|>"])
    return answer.choice.text


async def scored(calls: Calls, start: str, ending: str) -> float:
    """Log-probability of `ending` after `start`, by an echo that generates nothing."""
    start_tokens = (await calls.post("/tokenize", prompt=start))["count"]
    answer = await calls.complete(prompt=start + ending, max_tokens=0, echo=True, logprobs=1)
    return sum(answer.choice.logprobs[start_tokens:])


@pytest.mark.timeout(300)
async def test_scores_equal_those_of_direct_calls(
    live: LiveServer, calls: Calls, topology: str, first_topology: str, tmp_path: Path
) -> None:
    if topology != first_topology:
        pytest.skip("takes long and sees nothing of the topology")
    results, samples = await asyncio.to_thread(evaluate, live, tmp_path)

    sums = samples["epicycle_sums"]
    texts = [await generated(calls, sample["arguments"]["gen_args_0"]["arg_0"]) for sample in sums]
    right = [text == sample["doc"]["answer"] for text, sample in zip(texts, sums, strict=True)]
    assert texts == [sample["resps"][0][0] for sample in sums]
    assert [True, False] == sorted(set(right), reverse=True)
    assert sum(right) / len(right) == results["epicycle_sums"]["exact_match,none"]

    endings = samples["epicycle_endings"]
    assert len(endings) == 3
    picked = []
    for sample in endings:
        doc = sample["doc"]
        scores = [await scored(calls, doc["start"], ending) for ending in doc["endings"]]
        assert scores == [float(told[0][0]) for told in sample["resps"]]
        picked.append(scores.index(max(scores)) == doc["label"])
    assert sum(picked) / len(picked) == results["epicycle_endings"]["acc,none"]
