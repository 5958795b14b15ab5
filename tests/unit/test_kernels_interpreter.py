"""The GPU kernels, run in Triton's interpreter on a CPU, in a pytest process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "interpreted"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton isn't installed: pip install 'triton>=3.7.1'"
)
def test_kernels_meet_their_twins_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parents[1])
    assert 0 == run.returncode, run.stdout + run.stderr
