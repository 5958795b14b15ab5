"""Fixtures and options that every suite may use."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TOPOLOGIES = ("processes", "single-process")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--topology",
        choices=(*TOPOLOGIES, "both"),
        default="both",
        help="where the live suite runs its server: a process for each actor, one process, or one after the other",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none, and the summary says so."""
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def has_gpu() -> bool:
    """Asked of the driver, so that suites without torch don't import it."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private folder whose path leaves room for socket names (pytest's tmp_path is too long for ipc)."""
    with tempfile.TemporaryDirectory(prefix="ep", dir="/tmp") as folder:
        yield Path(folder)
