"""`python busy_attention.py SECONDS`: attention of prompts beside decode rows, in graphs that run over and over.

For several processes at once on one card. The last line printed is JSON: launches of each, and how many of them
differed, by the rows of an item of prompts.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor

from epicycle.engine.kernels.share_check import CASES, Both

OURO = (16, 16, 128, 16, torch.bfloat16)  # heads, KV heads, lanes of a head, positions of a page
TIMES = 12  # of every share in one graph


def capture(both: Both, expected: Tensor, wrong: Tensor) -> torch.cuda.CUDAGraph:
    """Adds up in `wrong` [] how many launches differ from `expected`, which must live as long as the graph."""

    def launch() -> None:
        for share in both.shares:
            wrong.add_((both.attend(share) != expected).any())

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            launch()
    return graph


def main(seconds: float) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cases = [Both(*OURO, device, *case) for case in CASES]
    wrong = torch.zeros(len(cases), dtype=torch.int64, device=device)
    expected = [both.attend(None) for both in cases]
    graphs = [capture(*given) for given in zip(cases, expected, wrong, strict=True)]
    end, launches = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        launches += TIMES * len(cases[0].shares)
    found = {str(rows): count for (rows, _), count in zip(CASES, wrong.tolist(), strict=True)}
    print(json.dumps({"launches": launches, "wrong": found}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
