"""Other processes on the card: launches are put off and resumed there at any place, and no bit may show it.

The requests are those with which `engine.card_sharing = "on"` was seen to fail, in three processes of three.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from epicycle.engine.hardware import give_back_memory

ROOM = 115 << 30  # bytes: three engines at once
PROCESSES = 3
VERIFY = [
    *(sys.executable, "-m", "epicycle", "verify", "--device", "cuda", "--model", "ouro-1.4b", "--weights", "random"),
    *("--trials", "40", "--seed", "7", "--longest-prompt", "4096", "--conditions", "8-concurrent", "chunk-256"),
    *("--set", "kv_memory_bytes=32212254720"),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(420),
]


def test_outputs_are_the_same_while_others_use_the_card() -> None:
    give_back_memory()
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < ROOM:
        pytest.skip(f"{free_bytes >> 30} GiB of GPU memory are free, {ROOM >> 30} are needed")
    running = [subprocess.Popen(VERIFY, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    printed = [process.communicate()[0] for process in running]
    for process, lines in zip(running, printed, strict=True):
        found = json.loads(lines.splitlines()[-1])
        assert (40, 0, 0) == (found["trials"], found["differ"], process.returncode), lines
