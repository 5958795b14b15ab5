"""Fixtures and options that every suite may use."""

from __future__ import annotations

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


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private folder whose path leaves room for socket names (pytest's tmp_path is too long for ipc)."""
    with tempfile.TemporaryDirectory(prefix="ep", dir="/tmp") as folder:
        yield Path(folder)
